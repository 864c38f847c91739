"""Encoding texts with tokenizer.json, in pieces of bounded size."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from gpuscore.errors import ConfigError, InternalError, InvalidRequest
from gpuscore.models.files import MAX_TOKENIZER, is_file
from gpuscore.text.boundaries import (
    PIECE_CHARS,
    OverLimit,
    announce,
    batches,
    check_limit,
    cost,
    find_boundaries,
    is_long,
    limit_without,
    pieces,
)
from gpuscore.text.controls import (
    Controls,
    Forbidden,
    Specials,
    find_controls,
    find_specials,
    without_controls,
)
from gpuscore.text.declared import (
    check_same_ids,
    continuing,
    named_tokens,
    rebuild,
)
from gpuscore.types.batch import NO_TOKENS, Int32Array

NONE = NO_TOKENS, NO_TOKENS


class TextEncoder:
    """The encoder of prompts and labels to token ids; thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        named: texts and ids of control tokens that other files name.
        template: the source of the chat template, which writes control tokens.
        forbidden: ids that no text may give; ControlToken is raised for a text that does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        named: Collection[str | int] = (),
        template: str = "",
        forbidden: Forbidden | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._named = named
        self._template = template
        self._forbidden = forbidden
        self._for_callers: dict[frozenset[int], TextEncoder] = {}
        specials = find_specials(tokenizer)
        self._specials = specials or Specials(NO_TOKENS, NO_TOKENS)
        self.boundaries = None if specials is None else find_boundaries(tokenizer)
        self._find_split = None if self.boundaries is None else self.boundaries.first

    @classmethod
    def read(cls, directory: Path, template: str = "") -> "TextEncoder | None":
        """Return the model's tokenizer, or None if the directory has none (token ids only).

        Args:
            directory: the model's directory.
            template: the source of its chat template.

        Raises:
            ConfigError: it cannot be read, the tokenizers library does not accept it, or files
                beside it contradict it.
        """
        path = directory / "tokenizer.json"
        if not is_file(path, MAX_TOKENIZER):
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
            check_same_ids(directory, tokenizer)
            rebuild(directory, tokenizer)
            return cls(tokenizer, named_tokens(directory), template)
        except (KeyboardInterrupt, SystemExit, ConfigError):
            raise
        except BaseException as error:  # the library raises Exception, or BaseException on a panic
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error

    def prompts(
        self,
        prompts: Iterable[str],
        special: bool = True,
        limit: int | None = None,
    ) -> Iterator[Int32Array]:
        """Yield the ids of each prompt, by default with the post-processor's special tokens.

        Prompts are read and encoded at most one piece ahead of the caller.

        Args:
            prompts: the texts.
            special: add the special tokens.
            limit: tokens of a prompt; a much longer prompt is not encoded to its end.

        Raises:
            OverLimit: the next prompt is longer than a piece and has more than `limit` tokens.
        """
        for batch in batches(prompts):
            if is_long(batch[0]):
                yield self._encode_long(batch[0], special, limit)
                continue
            announce(cost(batch))
            for encoding in self._encode(batch, special):
                yield self._checked(np.array(encoding.ids, dtype=np.int32))

    @property
    def num_closing(self) -> int:
        """Number of tokens that the post-processor adds at the end of every prompt."""
        return len(self._specials.closing)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens, special ones included; unknown ids add nothing."""
        return self._decode([ids])[0]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone; part of a character is a replacement character."""
        return self._decode([[id] for id in ids])

    def token_name(self, id: int) -> str | None:
        """Return the vocabulary's entry for an id, or None if there is none."""
        return self.tokenizer.id_to_token(id)

    def joined(
        self,
        query: str,
        items: Callable[[int], Iterable[str]],
        item_first: bool,
        limit: int | None = None,
    ) -> Callable[[int], Iterator[Int32Array]]:
        """Return a function that takes a number and yields, for all items from this one on, the ids
        of query + item (or item + query), as `prompts` does, but faster.

        The query is split at a safe split (`boundaries`), if it has one. The part before it (after
        it, with `item_first`) has the same ids in every prompt and is encoded once, however often
        the function is called.

        Args:
            items: returns the items from a number on.
        """
        bounds = self.boundaries
        split = bounds and (bounds.first(query) if item_first else bounds.last(query))
        if not split:
            return lambda start: self.prompts(
                (f"{i}{query}" if item_first else f"{query}{i}" for i in items(start)),
                True,
                limit,
            )
        head = query[:split]
        tail = query[split - 1 :]  # begins with the guard
        shared: list[tuple[Int32Array, Int32Array, int]] = []

        def prompts(start: int) -> Iterator[Int32Array]:
            if not shared:
                shared.append(self._ids_around(head, tail, item_first, limit))
            opening, closing, skipped = shared[0]
            with limit_without(len(opening) + len(closing) - skipped, limit) as left:
                texts = (f"{i}{head}" if item_first else f"{tail}{i}" for i in items(start))
                for ids in self.prompts(texts, False, left):
                    yield np.concatenate((opening, ids[skipped:], closing))

        return prompts

    def _ids_around(
        self, head: str, tail: str, item_first: bool, limit: int | None
    ) -> tuple[Int32Array, Int32Array, int]:
        """Return the ids before and after each item's, and how many first ids of an item to drop.

        The tail begins with the guard, a character whose ids are dropped: with `item_first` from
        the tail, which all prompts share, otherwise from each item's ids.
        """
        opening = self._specials.opening
        closing = self._specials.closing
        guard = self._num_ids(tail[0])
        shared = self.plain_ids(tail if item_first else head, limit)
        if item_first:
            return opening, np.concatenate((shared[guard:], closing)), 0
        return np.concatenate((opening, shared)), closing, guard

    def num_shared(self, query: str, limit: int | None = None) -> int:
        """Return how many first tokens all prompts of `joined(query, ...)` are certain to share.

        The number depends on the query alone; it is 0 if the query has no safe split.
        """
        split = self.boundaries and self.boundaries.last(query)
        if not split:
            return 0
        return len(self._specials.opening) + len(self.plain_ids(query[:split], limit))

    def _checked(self, ids: Int32Array) -> Int32Array:
        return ids if self._forbidden is None else self._forbidden.checked(ids)

    def _encode_long(self, text: str, special: bool, limit: int | None) -> Int32Array:
        """Encode one text in pieces; raise OverLimit once it has more than `limit` tokens."""
        # With boundaries, `_specials` are known, so the pieces are encoded without them.
        in_parts = special and self.boundaries is not None
        opening, closing = (self._specials.opening, self._specials.closing) if in_parts else NONE
        arrays = [opening]
        count = len(opening) + len(closing)
        check_limit(count, limit)
        for begin, piece in pieces(text, self._find_split):
            skipped = self._num_ids(piece[0]) if begin else 0
            if limit is not None and self._encode_start(piece, limit - count + skipped):
                raise OverLimit(limit + 1)
            announce(len(piece))
            (encoding,) = self._encode([piece], special and not in_parts)
            count += len(encoding) - skipped
            check_limit(count, limit)  # before the list of ids, maybe millions, is made
            arrays.append(self._checked(np.array(encoding.ids, dtype=np.int32)[skipped:]))
        return np.concatenate((*arrays, closing))

    def _num_ids(self, guard: str) -> int:
        """Return the number of ids of a single character."""
        return len(self._encode([guard], special=False)[0])

    def plain_ids(self, text: str, limit: int | None = None) -> Int32Array:
        """Return the ids of a text without special tokens around it; raises OverLimit."""
        (ids,) = self.prompts([text], False, limit)
        return ids

    def first_tokens(self, text: str, count: int) -> str:
        """Return the part of a text that its first `count` tokens cover; `count` is at least 1.

        At most one piece beyond that part is encoded.
        """
        seen = end = 0
        for begin, piece in pieces(text, self._find_split):
            skipped = self._num_ids(piece[0]) if begin else 0
            encoding = self._encode_start(piece, count - seen + skipped)
            if encoding is None:
                announce(len(piece))
                encoding = self._with_places(piece)
            new = min(len(encoding) - skipped, count - seen)
            if new:
                # Faster than `offsets`, which would make a list for all tokens.
                place = encoding.token_to_chars(skipped + new - 1)
                assert place is not None  # noqa: S101  (there is such a token)
                end = begin + place[1]
            if seen + len(encoding) - skipped > count:
                return text[:end]
            seen += new
        return text

    def _encode_start(self, piece: str, count: int) -> Encoding | None:
        """Return more than `count` first tokens of a piece, which has no safe split; None if it has
        fewer, or is short.

        PIECE_CHARS characters follow these tokens. Later characters could change the tokens only
        through a chain of overlapping merges, each of a lower rank than the one before it.
        """
        width = 2 * PIECE_CHARS
        while width < len(piece):
            announce(width)
            encoding = self._with_places(piece[:width])
            place = encoding.token_to_chars(count) if count < len(encoding) else None
            if place is not None and place[1] + PIECE_CHARS <= width:
                return encoding
            width *= 2
        return None

    def _with_places(self, text: str) -> Encoding:
        """Return a text's tokens, which know their places in it."""
        with _tokenizing():
            (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        return encoding

    @cached_property
    def controls(self) -> Controls:
        """The model's control tokens."""
        return find_controls(self.tokenizer, self._named, self._template)

    @cached_property
    def continuing(self) -> "TextEncoder":
        """The encoder of text that does not begin a prompt."""
        other = continuing(self.tokenizer)
        if other is None:
            return self
        return TextEncoder(other, self._named, self._template, self._forbidden)

    @property
    def markers(self) -> list[str]:
        """The texts at which a rendered template is divided, see `prompts.chat.parts_of`."""
        added = self.tokenizer.get_added_tokens_decoder()
        return [*self.controls.texts, *(added[id].content for id in self.controls.possible)]

    def for_callers(self, frame: Iterable[int] = ()) -> "TextEncoder":
        """Return an encoder for the parts of prompts that hold callers' texts.

        It adds no special tokens. The text of a control token becomes other tokens; where that is
        impossible, ControlToken is raised.

        Args:
            frame: ids of the other parts, in which further control tokens may be.
        """
        ids = self.controls.ids | self.controls.possible.intersection(frame)
        if ids not in self._for_callers:
            other = without_controls(self.tokenizer, ids)
            forbidden = Forbidden(ids, self.tokenizer.id_to_token)
            self._for_callers[ids] = TextEncoder(other, forbidden=forbidden)
        return self._for_callers[ids]

    def _decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        with _tokenizing():
            return self.tokenizer.decode_batch(sequences, skip_special_tokens=False)

    def _encode(self, texts: list[str], special: bool) -> list[Encoding]:
        # Unlike `encode`, the batch methods release the GIL.
        with _tokenizing():
            return self.tokenizer.encode_batch_fast(texts, add_special_tokens=special)


@contextmanager
def _tokenizing() -> Iterator[None]:
    """Turn the tokenizer's exceptions into errors for the caller."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequest("text holds a lone surrogate") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the tokenizer is not an Exception
        raise InternalError("the tokenizer failed") from error
