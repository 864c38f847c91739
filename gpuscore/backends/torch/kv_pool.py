"""Keys and values of cached query tokens, by slot (slot = page * page_size + offset).

Indices of rows and slots are slices where they are consecutive.
"""

import math
import mmap
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.types.batch import Int32Array
from gpuscore_kernels.qk_norm_rope_store import Pages

Rows: TypeAlias = Tensor | slice  # slices are read and written in place


def rows_at(indices: np.ndarray, device: torch.device) -> Rows:
    """Return the slice of consecutive indices, else the indices as a tensor."""
    if len(indices) == 0 or (np.diff(indices) != 1).any():
        return index_of(indices, device)
    return slice(int(indices[0]), int(indices[-1]) + 1)


def index_of(values: np.ndarray, device: torch.device) -> Tensor:
    """Return the indices as int64 on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


class KVPool:
    """One tensor [Hkv, slots, D] per layer for keys and one for values; without slots in linear
    layers.

    With this order, gathered rows come out head by head. The pool starts as zeros. On a CPU, memory
    is taken when a page is first written, so pages that were never used cost none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.dtype = dtype
        self.layers: list[tuple[Tensor, Tensor]] = []
        for layer in range(config.num_layers):
            slots = 0 if config.is_linear(layer) else num_pages * page_size
            shape = (config.num_kv_heads, slots, config.head_dim)
            self.layers.append((zeros(shape, dtype, device), zeros(shape, dtype, device)))

    def write(self, layer: int, slots: Rows, k: Tensor, v: Tensor) -> None:
        """Store k, v [n, Hkv, D] at slots [n]."""
        for side, values in zip(self.layers[layer], (k, v), strict=True):
            if isinstance(slots, slice):
                side[:, slots] = values.transpose(0, 1)
            else:
                side.index_copy_(1, slots, values.transpose(0, 1))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v [Hkv, n, D] of slots [n]."""
        k, v = self.layers[layer]
        return k.index_select(1, slots), v.index_select(1, slots)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows of one batch whose keys and values are kept for later batches, and their slots."""

    pool: KVPool
    rows: Rows  # [n] of the batch
    slots: Rows  # [n]
    slot_of_row: Tensor  # [T]; -1 = not kept
    read: Tensor | None = None  # as `Pages.read`

    @staticmethod
    def of(slot_mapping: Int32Array, pool: KVPool) -> "KeptRows":
        rows = np.flatnonzero(slot_mapping >= 0)
        places, slots = (rows_at(x, pool.device) for x in (rows, slot_mapping[rows]))
        return KeptRows(pool, places, slots, index_of(slot_mapping, pool.device))

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store these rows of k and v [T, Hkv, D]."""
        if isinstance(self.rows, slice) or len(self.rows):
            self.pool.write(layer, self.slots, k[self.rows], v[self.rows])

    def pages(self, layer: int) -> Pages:
        """Return the pages and slots for a kernel that stores keys and values itself."""
        return Pages(*self.pool.layers[layer], self.slot_of_row, self.read)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that on a CPU take memory when they are first written."""
    if device.type != "cpu" or math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write every page, and so take all the memory at once.
    fresh = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(fresh, dtype=dtype).view(shape)
