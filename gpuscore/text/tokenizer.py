"""tokenizer.json, run as its authors meant it, in bounded pieces."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from gpuscore.errors import ConfigError, InternalError, InvalidRequest, LabelNotSingleToken
from gpuscore.model_files import MAX_TOKENIZER, is_file
from gpuscore.text.boundaries import find_boundaries
from gpuscore.text.declared import refuse_other_ids
from gpuscore.text.specials import Specials, find_specials
from gpuscore.types import NO_TOKENS, Int32Array

PIECE_CHARS = 1 << 18  # characters handed to the tokenizer at a time
SHOWN_IDS = 16  # ids in an error message


class TextEncoder:
    """Prompts and labels to ids; safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        specials = find_specials(tokenizer)
        self._specials = specials or Specials(NO_TOKENS, NO_TOKENS)
        self._boundaries = None if specials is None else find_boundaries(tokenizer)

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

    def prompts(self, prompts: Iterable[str], special: bool = True) -> Iterator[Int32Array]:
        """Ids of each prompt as a whole, by default with the post-processor's special tokens.

        Reads and encodes no more than a piece ahead of what is taken.
        """
        return self._ids(prompts, special)

    def text(self, ids: Sequence[int]) -> str:
        """What the tokens say together, special ones included; unknown ids say nothing."""
        return self._decode([ids])[0]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each token says by itself: a part of a character is a replacement character."""
        return self._decode([[id] for id in ids])

    def token_name(self, id: int) -> str | None:
        """The token as the vocabulary has it; None if it has not."""
        return self._tokenizer.id_to_token(id)

    def joined(self, query: str, items: Iterable[str], item_first: bool) -> Iterator[Int32Array]:
        """Exactly `prompts` of query + item (or item + query), as lazily, but faster.

        What lies beyond a safe cut of the query (`boundaries`) is the same in every prompt and is
        encoded once. Without a safe cut every prompt is encoded as a whole.
        """
        bounds = self._boundaries
        cut = bounds and (bounds.first(query) if item_first else bounds.last(query))
        if not cut:
            return self.prompts(f"{i}{query}" if item_first else f"{query}{i}" for i in items)
        head, guard, tail = query[:cut], query[cut - 1], query[cut:]
        if item_first:
            return self._before(items, head, guard, tail)
        return self._after(head, guard, tail, items)

    def num_shared(self, query: str) -> int:
        """How many first tokens every prompt of `joined(query, ..., item_first=False)` has.

        It depends on the query alone; 0 where nothing is certain.
        """
        cut = self._boundaries and self._boundaries.last(query)
        if not cut:
            return 0
        (shared,) = self._ids([query[:cut]], special=False)
        return len(self._specials.opening) + len(shared)

    def _after(
        self, head: str, guard: str, tail: str, items: Iterable[str]
    ) -> Iterator[Int32Array]:
        """ids(head) once, then tail + item of each prompt behind the guard."""
        shared, guarding = self._ids([head, guard], special=False)
        shared = np.concatenate((self._specials.opening, shared))
        closing, skipped = self._specials.closing, len(guarding)
        for ids in self._ids((f"{guard}{tail}{item}" for item in items), special=False):
            yield np.concatenate((shared, ids[skipped:], closing))

    def _before(
        self, items: Iterable[str], head: str, guard: str, tail: str
    ) -> Iterator[Int32Array]:
        """Item + head of each prompt, then the ids of tail, made once behind the guard."""
        shared, guarding = self._ids([guard + tail, guard], special=False)
        shared = np.concatenate((shared[len(guarding) :], self._specials.closing))
        opening = self._specials.opening
        for ids in self._ids((f"{item}{head}" for item in items), special=False):
            yield np.concatenate((opening, ids, shared))

    def _ids(self, texts: Iterable[str], special: bool) -> Iterator[Int32Array]:
        for piece in _pieces(texts):
            for encoding in self._encode(piece, special):
                yield np.array(encoding.ids, dtype=np.int32)

    def plain_ids(self, text: str) -> Int32Array:
        """Ids of a text, without what the post-processor puts around it."""
        (ids,) = self._ids([text], special=False)
        return ids

    def first_tokens(self, text: str, count: int) -> str:
        """The part of a text that its first `count` tokens stand for."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        if len(encoding.ids) <= count:
            return text
        return text[: encoding.offsets[count - 1][1]]

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

    def label_ids(self, labels: Sequence[str]) -> list[int]:
        """The one token of each label, without special tokens.

        Raises:
            LabelNotSingleToken: a label is none or several tokens; the message has their ids.
        """
        ids = [encoding.ids for encoding in self._encode(list(labels), special=False)]
        for index, tokens in enumerate(ids):
            if len(tokens) != 1:
                more = "" if len(tokens) <= SHOWN_IDS else ", ..."
                shown = ", ".join(map(str, tokens[:SHOWN_IDS])) + more
                raise LabelNotSingleToken(
                    f"labels[{index}] is {len(tokens)} tokens ([{shown}]), it must be exactly one",
                    param=f"labels[{index}]",
                )
        return [tokens[0] for tokens in ids]

    def _decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        try:
            return self._tokenizer.decode_batch(sequences, skip_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the tokenizer is not an Exception
            raise InternalError("the tokenizer failed") from error

    def _encode(self, texts: list[str], special: bool) -> list[Encoding]:
        # encode_batch, unlike encode, releases the GIL.
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except UnicodeEncodeError as error:
            raise InvalidRequest("text holds a lone surrogate") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the tokenizer is not an Exception
            raise InternalError("the tokenizer failed") from error


def _pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    """Runs of texts of about PIECE_CHARS together, at least one text each."""
    piece: list[str] = []
    size = 0
    for text in texts:
        if piece and size + len(text) > PIECE_CHARS:
            yield piece
            piece, size = [], 0
        piece.append(text)
        size += len(text)
    if piece:
        yield piece
