"""Frames between rank 0 and each other rank, over a socket pair: a kind, a length and bytes."""

import socket
import struct
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from typing import Any

import numpy as np

from gpuscore.types.batch import Int32Array, PackedBatch

BEAT = 0.5  # seconds
_HEAD = struct.Struct("<cI")


class Kind(Enum):
    """The kinds of frames."""

    START = b"S"  # settings and place, JSON: the first frame of rank 0
    WARMUP = b"W"
    BATCH = b"B"  # words of a batch
    LOADED = b"L"  # a rank has read its weights: its first frame
    ALIVE = b"A"  # from a rank that is ready, every BEAT seconds
    REFUSED = b"R"  # text of the ConfigError with which a rank ends
    FAILED = b"F"  # text of any other error with which a rank ends


def send(sock: socket.socket, kind: Kind, body: bytes = b"") -> None:
    sock.sendall(_HEAD.pack(kind.value, len(body)) + body)


def frames(sock: socket.socket) -> Iterator[tuple[Kind, bytes]]:
    """Yield frames until the other end is closed, for example because its process died."""
    with sock.makefile("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, size = _HEAD.unpack(head)
            if len(body := file.read(size)) < size:
                return
            yield Kind(kind), body


def words_of(batch: PackedBatch) -> bytes:
    """Return a batch as int32: num_top, the page table's width, the arrays' lengths, the arrays."""
    arrays = [getattr(batch, name).reshape(-1) for name in _ARRAYS]
    sizes = [batch.num_top, batch.page_table.shape[1], *map(len, arrays)]
    words: bytes = np.concatenate([sizes, *arrays]).astype(np.int32).tobytes()
    return words


def batch_of(words: bytes) -> PackedBatch:
    """Return the batch of `words_of`."""
    numbers: Int32Array = np.frombuffer(words, np.int32)
    num_top, width, *lengths = numbers[: len(_ARRAYS) + 2].tolist()
    parts = np.split(numbers[len(_ARRAYS) + 2 :], np.cumsum(lengths[:-1]))
    arrays: dict[str, Any] = dict(zip(_ARRAYS, parts, strict=True))
    arrays["page_table"] = arrays["page_table"].reshape(len(arrays["prefix_lens"]), width)
    arrays["need_lse"] = arrays["need_lse"].astype(np.bool_)
    return PackedBatch(**arrays, num_top=num_top)


_ARRAYS = tuple(field.name for field in fields(PackedBatch) if field.name != "num_top")
