"""A GGUF file's header and tensors. The file is not trusted: every length is checked before use.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from gpuscore.errors import UsageError
from gpuscore.models.files import MAX_JSON, shown

MAGIC, VERSIONS = b"GGUF", (2, 3)
# The largest vocabularies and lists of merges have about 300,000 entries, tokens 1,000 bytes.
MAX_ENTRIES, MAX_FIELDS, MAX_TENSORS, MAX_DIMS = 2**21, 4096, 2**16, 4
ALIGNMENT = 32  # bytes, unless the header says otherwise
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{7: "?", 10: "Q", 11: "q", 12: "d"},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place and format of a tensor in the file.

    Args:
        shape: as torch has it, the last dimension's elements side by side.
        kind: the number format.
        start, size: of its bytes in the file.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


class GgufFile:
    """The metadata and tensors of a GGUF file.

    Attributes:
        path: of the file.
        metadata: values by key.
        tensors: by name.

    Raises:
        UsageError: the file is not GGUF, or is damaged; the message says where.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, np.uint8, "r")
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                header = _Header(data)
                self.metadata, self.tensors = header.read()
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, struct.error) as error:  # of an empty file, too
            raise UsageError(f"{path} is a damaged GGUF file: {error}") from error

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; raises UsageError if the file has none."""
        return str(self.of_type("general.architecture", str))

    def of_type(self, key: str, kind: type) -> Any:
        """Return a value of the metadata; raises UsageError unless it is there and of this type."""
        value = self.metadata.get(key)
        if type(value) is not kind:
            text = "nothing" if value is None else shown(value)
            raise UsageError(f"{self.path}: {key} must be {_KINDS[kind]}, found {text}")
        return value

    def values(self, name: str) -> np.ndarray:
        """Return a tensor's numbers in float32, in the shape that torch has."""
        tensor = self.tensors[name]
        stored = self._bytes[tensor.start : tensor.start + tensor.size]
        rows = stored.reshape(prod(tensor.shape[:-1]), -1)
        with np.errstate(all="ignore"):  # a scale of NaN is refused with the tensor's name
            values: np.ndarray = dequantize(rows, tensor.kind).reshape(tensor.shape)
        return values


_KINDS: dict[type, str] = {str: "a text", int: "an integer", float: "a number", list: "a list"}


class _Header:
    """A reader of the header; raises ValueError or struct.error where it is damaged."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_fields = self._unpack("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version}; supported: 2 and 3")
        _bound(num_tensors, MAX_TENSORS, "tensors")
        _bound(num_fields, MAX_FIELDS, "fields")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._text()
            if key in metadata:
                raise ValueError(f"it has {shown(key)} twice")
            metadata[key] = self._value(*self._unpack("I"))
        return metadata, self._tensors(num_tensors, metadata.get("general.alignment", ALIGNMENT))

    def _tensors(self, count: int, alignment: Any) -> dict[str, StoredTensor]:
        entries = [self._tensor() for _ in range(count)]
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {shown(alignment)}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            size = _stored_bytes(name, shape, kind)
            if name in tensors:
                raise ValueError(f"it has a tensor {shown(name)} twice")
            if offset % alignment or start + offset + size > len(self._data):
                raise ValueError(
                    f"tensor {shown(name)} should lie at {start + offset:,} with {size:,} bytes, "
                    f"and the file has {len(self._data):,}"
                )
            tensors[name] = StoredTensor(shape, kind, start + offset, size)
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._text()
        (dims,) = self._unpack("I")
        _bound(dims, MAX_DIMS, f"dimensions of tensor {shown(name)}")
        shape = tuple(reversed(self._unpack(f"{dims}Q")))
        kind, offset = self._unpack("IQ")
        return name, shape, GGMLQuantizationType(kind), offset

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._unpack(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self._text(MAX_JSON)
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        inner, count = self._unpack("IQ")
        _bound(count, MAX_ENTRIES, "entries of a list")
        if inner in _NUMBERS:
            return list(self._unpack(f"{count}{_NUMBERS[inner]}"))
        if inner != _STRING:
            raise ValueError(f"a list has the type {inner}; supported: numbers and texts")
        return [self._text() for _ in range(count)]

    def _text(self, limit: int = 2**16) -> str:
        (length,) = self._unpack("Q")
        _bound(length, limit, "bytes of a text")
        return self._take(length).decode()

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise ValueError(f"it ends in its header, after {len(self._data):,} bytes")
        self._at += size
        return taken


def _bound(count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"it has {count:,} {what}; supported: at most {most:,}")


def _stored_bytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block:
        raise ValueError(
            f"tensor {shown(name)} has shape {list(shape)}; the last dimension must be a multiple "
            f"of {block} in {kind.name}"
        )
    return prod(shape) // int(block) * int(size)


def unreadable(kinds: set[GGMLQuantizationType]) -> list[str]:
    """Return the names of the formats that `gguf` does not dequantise."""
    return sorted(kind.name for kind in kinds if not _reads(dequantize, kind))


def _reads(read: Callable[..., object], kind: GGMLQuantizationType) -> bool:
    try:
        read(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
