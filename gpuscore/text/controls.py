"""Special tokens: a model's control tokens, a tokenizer that gives none for a caller's text,
and the tokens that the post-processor adds around any text.

Control tokens are

- added tokens that are `special`, that the files beside tokenizer.json name (bos, eos, ...), that
  look like a marker, or that a chat template or a prompt family writes;
- tokens that the post-processor adds;
- entries of the model's own vocabulary that read like one of these.

In the tokenizer for callers' texts, added control tokens are special, so `encode_special_tokens`
makes it pass over them. Entries of the vocabulary get names of random characters, which no text
holds, and merges that lead to them are dropped. All other ids stay. What cannot be spelled without
its entry, such as a single character, keeps it; `TextEncoder` refuses texts that give its id.

The model's unknown token is no control token unless it is bos or eos, too: texts give it for
characters that the vocabulary lacks.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from gpuscore.errors import InvalidRequest
from gpuscore.models.files import shown
from gpuscore.text.boundaries import flat
from gpuscore.text.pretokens import META
from gpuscore.types.batch import Int32Array

MARKER = re.compile(
    r"<[|\uff5c].*\w.*|<.*\w.*[|\uff5c]>|\uff5c.+\uff5c"  # <|im_end|>, <|turn>, <turn|>
    r"|<</?\w+>>|\[/?[A-Z][A-Z_]{2,}\]"  # <<SYS>>, [/INST]
    r"|</?[A-Za-z]+(?:_\w+>|:)"  # <start_of_turn>, <dsml:
    r"|</?(?:s|bos|eos|pad|cls|sep|mask|think)>"
)
STRIKE_TAGS = {"<s>", "</s>"}  # tags of HTML in a vocabulary that also has the next one
UNDERLINE_TAG = "<u>"


@dataclass(frozen=True, slots=True)
class Controls:
    """The control tokens of one model.

    Args:
        ids: the tokens' ids.
        texts: the tokens' texts; a template is divided at them.
        possible: ids of added tokens that are control tokens if a template writes them.
    """

    ids: frozenset[int]
    texts: frozenset[str]
    possible: frozenset[int]


class ControlToken(Exception):
    """A caller's text gives the id of a control token, and cannot be spelled otherwise."""


@contextmanager
def refused_controls(param: str) -> Iterator[None]:
    """Raise ControlToken as InvalidRequest with the place of the text."""
    try:
        yield
    except ControlToken as error:
        raise InvalidRequest(
            f"{param} has the control token {shown(error.args[0])}, which this tokenizer cannot "
            "spell with other tokens",
            param=param,
        ) from None


class Forbidden:
    """A check that ids contain no forbidden control token.

    Args:
        ids: ids of control tokens.
        name: returns the vocabulary's entry for an id.
    """

    def __init__(self, ids: Collection[int], name: Callable[[int], str | None]) -> None:
        self._is_control = np.zeros(max(ids, default=-1) + 2, dtype=np.bool_)
        self._is_control[[*ids]] = True  # the last entry is for all larger ids
        self._name = name

    def checked(self, ids: Int32Array) -> Int32Array:
        """Return these ids; raise ControlToken if one of them is a control token's."""
        forbidden = self._is_control.take(ids, mode="clip")
        if forbidden.any():
            raise ControlToken(self._name(int(ids[forbidden][0])))
        return ids


def find_controls(tokenizer: Tokenizer, named: Collection[str | int], template: str) -> Controls:
    """Return a tokenizer's control tokens.

    Args:
        tokenizer: the model's tokenizer.
        named: texts and ids of tokens that files beside tokenizer.json name.
        template: the source of the chat template; empty if there is none.
    """
    known = frozenset(named)
    added = tokenizer.get_added_tokens_decoder()
    html = any(token.content == UNDERLINE_TAG for token in added.values())
    possible = {id for id, token in added.items() if _is_shaped(token.content)}
    ids = {
        id
        for id, token in added.items()
        if token.special
        or not known.isdisjoint((id, token.content))
        or _is_marker(token.content.strip(), html)
        or (id in possible and token.content in template)
    }
    ids |= {*tokenizer.encode("").ids} - {*tokenizer.encode("", add_special_tokens=False).ids}
    texts = {added[id].content for id in ids if id in added}
    for entry, id in tokenizer.get_vocab(with_added_tokens=False).items():
        if id not in added and (entry in texts or "<" in entry or "[" in entry):
            text = _text_of(entry, tokenizer).strip()
            if text in texts or _is_marker(text, html) or (id in known and _is_shaped(text)):
                ids.add(id)
                texts.add(text)
    unknown = _unknown_token_id(tokenizer)
    if unknown is not None and known.isdisjoint((unknown, tokenizer.id_to_token(unknown))):
        ids.discard(unknown)
    return Controls(frozenset(ids), frozenset(filter(None, texts)), frozenset(possible - ids))


def without_controls(tokenizer: Tokenizer, ids: Collection[int]) -> Tokenizer:
    """Return a copy that adds no tokens to a text, and gives these ids for no text."""
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((e[0], id) for id, e in enumerate(vocab))
    entries = {entry for entry, id in pairs if id in ids}
    hidden = _hidden(state, ids, entries)
    kept = {entry for entry in entries if not _is_spelled(hidden, _text_of(entry, tokenizer))}
    return _hidden(state, ids, entries - kept) if kept else hidden


def _hidden(state: Mapping[str, Any], ids: Collection[int], entries: Collection[str]) -> Tokenizer:
    """Return the tokenizer of this JSON with other names for these entries of its vocabulary.

    Added tokens with one of the ids become special, and special ones are not searched.
    """
    names = {entry: _private_name() for entry in entries}
    added = [
        {
            **token,
            "special": token["special"] or token["id"] in ids,
            "content": names.get(token["content"], token["content"]),
        }
        for token in state["added_tokens"]
    ]
    model = dict(state["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(entry, entry): id for entry, id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(entry, entry), score] for entry, score in model["vocab"]]
    if names and "merges" in model:
        affix = len(model["continuing_subword_prefix"] or "")
        model["merges"] = [
            [left, other]
            for left, other in model["merges"]
            if not (left in names or other in names)
            and not (left + other in names or left + other[affix:] in names)
        ]
    changed = {**state, "post_processor": None, "added_tokens": added, "model": model}
    hidden = Tokenizer.from_str(json.dumps(changed))
    hidden.encode_special_tokens = True
    hidden.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return hidden


def _private_name() -> str:
    """Return a name that no text holds: 128 random bits as characters for private use."""
    return "".join(chr(0xF0000 + byte) for byte in secrets.token_bytes(16))


def _is_spelled(tokenizer: Tokenizer, text: str) -> bool:
    """Return True if tokens cover this text; a model may fail at characters or drop them."""
    try:
        places = tokenizer.encode(text).offsets
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001  (the library's, for a character without a token)
        return False
    covered = {*chain.from_iterable(range(*place) for place in places)}
    return all(i in covered or c.isspace() for i, c in enumerate(text))


def _is_shaped(text: str) -> bool:
    """Return True for a text that is more than a word, white space or a pair of symbols."""
    return len(text.strip()) > 2 and not all(c.isalnum() or c.isspace() or c == META for c in text)


def _is_marker(text: str, html: bool) -> bool:
    return MARKER.fullmatch(text) is not None and not (html and text in STRIKE_TAGS)


def _text_of(entry: str, tokenizer: Tokenizer) -> str:
    """Return the text that an entry of the vocabulary stands for."""
    entry = entry.removeprefix(getattr(tokenizer.model, "continuing_subword_prefix", None) or "")
    if all(c in _BYTES for c in entry):  # an entry in the alphabet of bytes, or ASCII
        return bytes(_BYTES[c] for c in entry).decode(errors="replace")
    return entry.replace(META, " ")


def byte_alphabet() -> Iterator[tuple[str, int]]:
    """Yield the character that stands for each byte in byte-level vocabularies, with the byte.

    The mapping is GPT-2's `bytes_to_unicode`: printable bytes stand for themselves, the others are
    mapped to characters after the first 256.
    """
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte), byte
        else:
            yield chr(shifted), byte
            shifted += 1


_BYTES = dict(byte_alphabet())


def _unknown_token_id(tokenizer: Tokenizer) -> int | None:
    """Return the model's id for text that its vocabulary lacks; None if there is none."""
    model = tokenizer.model
    if isinstance(model, models.Unigram):
        unknown: int | None = json.loads(model.__getstate__())["unk_id"]
        return unknown
    return None if model.unk_token is None else tokenizer.token_to_id(model.unk_token)


PROBES = ("a b", "1, 2", "Z\n", "")


@dataclass(frozen=True, slots=True)
class Specials:
    """The special tokens before and after a text."""

    opening: Int32Array
    closing: Int32Array


def find_specials(tokenizer: Tokenizer) -> Specials | None:
    """Return the special tokens before and after a text, or None if they may depend on the text.

    A template adds the same tokens to every text. They are found by comparing encodings with and
    without special tokens: exactly one split must fit all `PROBES`.
    """
    parts = flat(tokenizer.post_processor, "processors")
    if parts is None or not all(map(_is_constant, parts)):
        return None
    try:
        fitting = set.intersection(*(_splits(tokenizer, probe) for probe in PROBES))
    except Exception:  # noqa: BLE001  (raised by the library for characters without a token)
        return None
    if len(fitting) != 1:
        return None
    opening, closing = (np.array(ids, dtype=np.int32) for ids in fitting.pop())
    return Specials(opening, closing)


def _is_constant(part: Mapping[str, Any]) -> bool:
    if part["type"] == "ByteLevel":  # changes offsets only
        return True
    if part["type"] != "TemplateProcessing":
        return False
    sequences = [piece["Sequence"]["id"] for piece in part["single"] if "Sequence" in piece]
    return sequences == ["A"]


def _splits(tokenizer: Tokenizer, text: str) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return all (opening, closing) that fit the encodings of this text."""
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    full = tokenizer.encode(text).ids
    return {
        (tuple(full[:k]), tuple(full[k + len(plain) :]))
        for k in range(len(full) - len(plain) + 1)
        if full[k : k + len(plain)] == plain
    }
