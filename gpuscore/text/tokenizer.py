"""tokenizer.json, run as its authors meant it, in bounded pieces."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from gpuscore.arrays import NO_TOKENS, Int32Array
from gpuscore.errors import ConfigError, InternalError, InvalidRequest, LabelNotSingleToken
from gpuscore.model_files import MAX_TOKENIZER, is_file
from gpuscore.text.boundaries import find_boundaries
from gpuscore.text.declared import refuse_other_ids
from gpuscore.text.least import find_least_tokens
from gpuscore.text.pieces import OverLimit, batches, beside, check_limit, is_long, pieces
from gpuscore.text.specials import Specials, find_specials
from gpuscore.text.turns import ALONE, Turns

SHOWN_IDS = 16  # ids in an error message
NONE = NO_TOKENS, NO_TOKENS


class TextEncoder:
    """Prompts and labels to ids; safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        specials = find_specials(tokenizer)
        self._specials = specials or Specials(NO_TOKENS, NO_TOKENS)
        self._boundaries = None if specials is None else find_boundaries(tokenizer)
        self._least = find_least_tokens(tokenizer)

    @classmethod
    def read(cls, directory: Path) -> "TextEncoder | None":
        """The model's tokenizer, or None if the directory has none (ids only).

        Raises:
            ConfigError: it cannot be read, is not what the tokenizers library takes, or the files
                beside it say otherwise.
        """
        path = directory / "tokenizer.json"
        if not is_file(path, MAX_TOKENIZER):
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
            refuse_other_ids(directory, tokenizer)
            return cls(tokenizer)
        except (KeyboardInterrupt, SystemExit, ConfigError):
            raise
        except BaseException as error:  # the library raises plain Exception, and panics
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error

    def prompts(
        self,
        prompts: Iterable[str],
        special: bool = True,
        turns: Turns = ALONE,
        limit: int | None = None,
    ) -> Iterator[Int32Array]:
        """Ids of each prompt as a whole, by default with the post-processor's special tokens.

        Reads and encodes no more than a piece ahead of what is taken.

        Args:
            turns: asked before every piece.
            limit: tokens of a prompt; what is longer by far is not encoded to its end.

        Raises:
            OverLimit: the next prompt is long and has more tokens than that.
        """
        return self._ids(prompts, special, turns, limit)

    def text(self, ids: Sequence[int]) -> str:
        """What the tokens say together, special ones included; unknown ids say nothing."""
        return self._decode([ids])[0]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each token says by itself: a part of a character is a replacement character."""
        return self._decode([[id] for id in ids])

    def token_name(self, id: int) -> str | None:
        """The token as the vocabulary has it; None if it has not."""
        return self._tokenizer.id_to_token(id)

    def joined(
        self,
        query: str,
        items: Iterable[str],
        item_first: bool,
        turns: Turns = ALONE,
        limit: int | None = None,
    ) -> Iterator[Int32Array]:
        """Exactly `prompts` of query + item (or item + query), as lazily, but faster.

        What lies beyond a safe cut of the query (`boundaries`) is the same in every prompt and is
        encoded once. Without a safe cut every prompt is encoded as a whole.
        """
        bounds = self._boundaries
        cut = bounds and (
            bounds.first(query, turns=turns) if item_first else bounds.last(query, turns)
        )
        if not cut:
            texts = (f"{i}{query}" if item_first else f"{query}{i}" for i in items)
            return self._ids(texts, True, turns, limit)
        head, guard, tail = query[:cut], query[cut - 1], query[cut:]
        if item_first:
            return self._before(items, head, guard + tail, turns, limit)
        return self._after(head, guard + tail, items, turns, limit)

    def num_shared(self, query: str, turns: Turns = ALONE, limit: int | None = None) -> int:
        """How many first tokens every prompt of `joined(query, ..., item_first=False)` has.

        It depends on the query alone; 0 where nothing is certain.
        """
        cut = self._boundaries and self._boundaries.last(query, turns)
        if not cut:
            return 0
        shared = self.plain_ids(query[:cut], turns, limit)
        return len(self._specials.opening) + len(shared)

    def _after(
        self, head: str, tail: str, items: Iterable[str], turns: Turns, limit: int | None
    ) -> Iterator[Int32Array]:
        """ids(head) once, then tail + item of each prompt behind the guard, which tail begins
        with."""
        shared = self.plain_ids(head, turns, limit)
        shared = np.concatenate((self._specials.opening, shared))
        closing, skipped = self._specials.closing, self._num_ids(tail[0])
        around = len(shared) + len(closing) - skipped
        with beside(around, limit) as left:
            for ids in self._ids((f"{tail}{item}" for item in items), False, turns, left):
                yield np.concatenate((shared, ids[skipped:], closing))

    def _before(
        self, items: Iterable[str], head: str, tail: str, turns: Turns, limit: int | None
    ) -> Iterator[Int32Array]:
        """Item + head of each prompt, then the ids of tail, made once behind the guard."""
        shared = self.plain_ids(tail, turns, limit)[self._num_ids(tail[0]) :]
        shared = np.concatenate((shared, self._specials.closing))
        opening = self._specials.opening
        with beside(len(opening) + len(shared), limit) as left:
            for ids in self._ids((f"{item}{head}" for item in items), False, turns, left):
                yield np.concatenate((opening, ids, shared))

    def _ids(
        self, texts: Iterable[str], special: bool, turns: Turns, limit: int | None
    ) -> Iterator[Int32Array]:
        for batch in batches(texts):
            if is_long(batch[0]):
                yield self._long(batch[0], special, turns, limit)
                continue
            turns.before(sum(map(len, batch)))
            for encoding in self._encode(batch, special):
                yield np.array(encoding.ids, dtype=np.int32)

    def _long(self, text: str, special: bool, turns: Turns, limit: int | None) -> Int32Array:
        """Ids of one text, made in pieces; raises OverLimit as soon as they are certain to be
        more than `limit`."""
        if limit is not None and self._least is not None:
            check_limit(self._least.of(text, limit, turns), limit)
        in_parts = special and self._boundaries is not None  # which has seen to the post-processor
        opening, closing = (self._specials.opening, self._specials.closing) if in_parts else NONE
        found, count = [opening], len(opening) + len(closing)
        for begin, piece in pieces(text, self._boundaries, turns):
            skipped = self._num_ids(piece[0]) if begin else 0
            (encoding,) = self._encode([piece], special and not in_parts)
            count += len(encoding) - skipped
            check_limit(count, limit)  # before a list of millions of ids is made
            found.append(np.array(encoding.ids, dtype=np.int32)[skipped:])
        return np.concatenate((*found, closing))

    def _num_ids(self, guard: str) -> int:
        """Of a lone character."""
        return len(self._encode([guard], special=False)[0])

    def plain_ids(self, text: str, turns: Turns = ALONE, limit: int | None = None) -> Int32Array:
        """Ids of a text, without what the post-processor puts around it; raises OverLimit."""
        (ids,) = self._ids([text], False, turns, limit)
        return ids

    def first_tokens(self, text: str, count: int, turns: Turns = ALONE) -> str:
        """The part of a text that its first `count` tokens stand for; `count` is at least 1.

        Encodes no more than a piece beyond it.
        """
        seen = end = 0
        for begin, piece in pieces(text, self._boundaries, turns):
            skipped = self._num_ids(piece[0]) if begin else 0
            with _tokenizing():
                (encoding,) = self._tokenizer.encode_batch([piece], add_special_tokens=False)
            new = min(len(encoding) - skipped, count - seen)
            if new:
                # The same as in `offsets`, which are a list of all of them.
                place = encoding.token_to_chars(skipped + new - 1)
                assert place is not None  # noqa: S101  (there is such a token)
                end = begin + place[1]
            if seen + len(encoding) - skipped > count:
                return text[:end]
            seen += new
        return text

    def without_specials(self) -> "TextEncoder":
        """An encoder for parts of prompts: it puts nothing around a text, and sees nothing special
        in it."""
        other = Tokenizer.from_str(self._tokenizer.to_str())
        other.encode_special_tokens = True
        other.post_processor = TemplateProcessing(single="$A", special_tokens=[])
        return TextEncoder(other)

    @property
    def specials(self) -> list[str]:
        """The special tokens, as text."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def label_ids(self, labels: Sequence[str], turns: Turns = ALONE) -> list[int]:
        """The one token of each label, without special tokens.

        Raises:
            LabelNotSingleToken: a label is none or several tokens; the message has their ids,
                unless the label is very long.
        """
        found: list[int] = []
        try:
            for tokens in self._ids(labels, False, turns, limit=1):
                found.append(_single(tokens, f"labels[{len(found)}]"))
        except OverLimit as over:
            param = f"labels[{len(found)}]"
            raise LabelNotSingleToken(
                f"{param} is at least {over.least} tokens, it must be exactly one", param=param
            ) from None
        return found

    def _decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        try:
            return self._tokenizer.decode_batch(sequences, skip_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the tokenizer is not an Exception
            raise InternalError("the tokenizer failed") from error

    def _encode(self, texts: list[str], special: bool) -> list[Encoding]:
        # encode_batch, unlike encode, releases the GIL.
        with _tokenizing():
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)


@contextmanager
def _tokenizing() -> Iterator[None]:
    """What the tokenizer raises, as errors that a caller can see."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequest("text holds a lone surrogate") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the tokenizer is not an Exception
        raise InternalError("the tokenizer failed") from error


def _single(tokens: Int32Array, param: str) -> int:
    if len(tokens) == 1:
        return int(tokens[0])
    more = "" if len(tokens) <= SHOWN_IDS else ", ..."
    shown = ", ".join(map(str, tokens[:SHOWN_IDS].tolist())) + more
    raise LabelNotSingleToken(
        f"{param} is {len(tokens)} tokens ([{shown}]), it must be exactly one", param=param
    )
