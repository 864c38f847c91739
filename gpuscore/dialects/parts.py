"""Decodes a large body in parts, so that other threads can run in between.

msgspec holds the GIL while it decodes: a tenth of a second for a few megabytes of short lists. A
value of two bytes can become an object of a hundred bytes, so values are counted before they are
decoded.
"""

import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, UnsetType
from numpy.typing import NDArray

from gpuscore.config import RequestLimits
from gpuscore.errors import TooManyItems

PART = 2**16  # bytes that are scanned or decoded in one call
SPARE = 2**16  # values that no limit counts
_COMMA, _QUOTE, _LIST = b',"['
_MARKS = bytes(mark in b',"[]{}' for mark in range(256))
_STEPS = np.zeros(256, np.int8)  # how each character changes the depth of nesting
_STEPS[[*b"[{"]] = 1
_STEPS[[*b"]}"]] = -1
_AT_INDEX = re.compile(r" - at `\$(?:\[(\d+)\])?([^`]*)`$")

Places = NDArray[np.intp]
StructT = TypeVar("StructT", bound=msgspec.Struct)


class PartsDecoder(Generic[StructT]):
    """Decodes large bodies to the same values as one call of msgspec would."""

    def __init__(self, body: type[StructT]) -> None:
        fields = msgspec.structs.fields(body)
        # A struct whose fields are not decoded: it only finds each field's JSON.
        raw_fields: list[Any] = [
            (field.name, Raw) if field.required else (field.name, Raw | UnsetType, msgspec.UNSET)
            for field in fields
        ]
        outer = msgspec.defstruct("Outer", raw_fields, kw_only=True, forbid_unknown_fields=True)
        self._body = body
        self._outer = msgspec.json.Decoder(outer)
        # Fields that only other servers use are not decoded.
        known = [field for field in fields if field.default is not msgspec.UNSET]
        self._decoders = {f.name: msgspec.json.Decoder[Any](f.type) for f in known}

    def decode(self, data: bytes, limits: RequestLimits) -> StructT:
        """Return the body; raise msgspec's error, or TooManyItems if there are more values than the
        limits allow in a request, or too many fields."""
        if data.count(b":") > SPARE:
            depths = (levels for _, _, levels, _ in _scanned(memoryview(data)))
            if sum(np.count_nonzero(levels == 1) for levels in depths) > SPARE:
                raise TooManyItems(f"the body has over {SPARE} fields")
        outer = self._outer.decode(data)
        values = {name: getattr(outer, name) for name in outer.__struct_fields__}
        for name in self._decoders:
            if values[name] is msgspec.UNSET:
                del values[name]  # the field has a default
            else:
                values[name] = self._value(name, values[name], limits)
        return self._body(**values)

    def _value(self, name: str, raw: Raw, limits: RequestLimits) -> Any:
        whole = memoryview(raw)
        entries = list[Any]()
        for part in parts_of(whole, name, limits):
            try:
                value = self._decoders[name].decode(part)
            except msgspec.ValidationError as error:
                raise msgspec.ValidationError(_moved(str(error), name, len(entries))) from None
            if part is whole:
                return value
            entries += value
            if type(entries[-1]) not in (int, float):  # numbers were counted in `parts_of`
                _check_count(len(entries), limits.max_items + limits.max_labels, name)
        return entries


def parts_of(whole: memoryview, name: str, limits: RequestLimits) -> Iterator[bytes | memoryview]:
    """Yield the JSON of a value, or for a long list several lists with its entries.

    Raises:
        TooManyItems: it has too many numbers, or an entry has too many other values.
    """
    max_numbers = max(limits.max_request_tokens, limits.max_items * limits.max_labels)
    end = 1
    numbers = others = 0
    for start, commas, levels, begun in _scanned(whole) if len(whole) > PART else ():
        numbers += len(commas)
        others += begun
        separators = commas[levels == 1]
        if whole[0] == _LIST and len(separators):
            last = start + int(separators[-1])
            yield b"[%b]" % bytes(whole[end:last])
            end = last + 1
            others = 0
        _check_count(numbers, max_numbers, name)
        _check_count(others, limits.max_items + limits.max_labels, name)
    yield whole if end == 1 else b"[%b" % bytes(whole[end:])


def _scanned(whole: memoryview) -> Iterator[tuple[int, Places, Places, int]]:
    """Yield for each part of a JSON value: where it begins, its commas outside of texts, the depth
    of each comma, and how many lists, objects and texts begin."""
    start = 0
    level = 0
    is_text = False
    while start < len(whole):
        piece = bytes(whole[start : start + PART])
        # A backslash must not be separated from what it escapes.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = bytes(whole[start : start + PART + 1])
        unescaped = piece.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
        places = np.flatnonzero(np.frombuffer(unescaped.translate(_MARKS), np.bool_))
        start += len(piece)
        if not len(places):
            continue
        marks = np.frombuffer(unescaped, np.uint8)[places]
        texts = np.cumsum(marks == _QUOTE) + is_text
        steps = np.where(texts & 1, 0, _STEPS[marks])
        levels = np.cumsum(steps) + level
        commas = (marks == _COMMA) & (texts & 1 == 0)
        begun = int(np.count_nonzero(steps > 0) + (texts[-1] + 1) // 2)
        yield start - len(piece), places[commas], levels[commas], begun
        level = int(levels[-1])
        is_text = bool(texts[-1] & 1)


def _check_count(count: int, most: int, name: str) -> None:
    if count > most + SPARE:
        text = f"{name} has over {most + SPARE} values, more than the limits allow"
        raise TooManyItems(text, param=name)


def _moved(message: str, name: str, before: int) -> str:
    """Return msgspec's message about a part with the path in the whole body.

    `before` is the number of entries before the part.
    """
    at = _AT_INDEX.search(message)
    if at is None:
        return f"{message} - at `$.{name}`"
    index = "" if at[1] is None else f"[{int(at[1]) + before}]"
    return f"{message[: at.start()]} - at `$.{name}{index}{at[2]}`"
