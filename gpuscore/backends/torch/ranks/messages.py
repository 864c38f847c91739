"""Frames between rank 0 and each other rank, over a socket pair: a kind, a length and bytes."""

import socket
import struct
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum

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
    """Yield frames until the other end is closed, as by its process's death."""
    with sock.makefile("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, size = _HEAD.unpack(head)
            if len(body := file.read(size)) < size:
                return
            yield Kind(kind), body


def words_of(batch: PackedBatch) -> bytes:
    """Return a batch as int32: num_top, the arrays' lengths, the page table's width, the arrays."""
    arrays = [np.asarray(getattr(batch, name), np.int32) for name in _ARRAYS]
    sizes = [batch.num_top, *(array.size for array in arrays), batch.page_table.shape[1]]
    flat = (array.reshape(-1) for array in arrays)
    words: bytes = np.concatenate([np.array(sizes, np.int32), *flat]).tobytes()
    return words


def batch_of(words: bytes) -> PackedBatch:
    """Return the batch of `words_of`."""
    numbers: Int32Array = np.frombuffer(words, np.int32)
    num_top, *lengths = numbers[: len(_ARRAYS) + 1].tolist()
    width = int(numbers[len(_ARRAYS) + 1])
    ends = np.cumsum([len(_ARRAYS) + 2, *lengths])
    arrays = {
        name: numbers[start:end]
        for name, start, end in zip(_ARRAYS, ends[:-1], ends[1:], strict=True)
    }
    requests = len(arrays["prefix_lens"])
    return PackedBatch(
        **arrays
        | {
            "page_table": arrays["page_table"].reshape(requests, width),
            "need_lse": arrays["need_lse"].astype(np.bool_),
        },
        num_top=num_top,
    )


_ARRAYS = tuple(field.name for field in fields(PackedBatch) if field.name != "num_top")
