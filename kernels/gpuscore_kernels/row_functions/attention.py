"""Attention by `attention.c` on tensors; `extend_attention.reference` defines it."""

import ctypes
import math
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from gpuscore_kernels.extend_attention.table import DeviceTiles
from gpuscore_kernels.row_functions.build import declare

# As in attention.c.
KEYS = 16  # of a tile
MOST = 4  # tiles of a block
TOGETHER = 6  # rows
LOG2_E = math.log2(math.e)


class _Side(ctypes.Structure):
    _fields_ = (("start", c_void_p), ("token", c_int64), ("head", c_int64))


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, _Side) for name in ("q", "k", "v", "pool_k", "pool_v", "out")),
        *((name, c_void_p) for name in ("rows", "tiles", "pool_tiles", "masked", "work")),
        *((name, c_int64) for name in ("num_rows", "num_tiles", "kv_heads", "group", "size")),
        *((name, c_int64) for name in ("most_tiles", "window")),
        *((name, c_float) for name in ("scale", "cap")),
    )


class AttentionFunctions:
    """Attention in C for rows of one dtype, on as many threads as torch has.

    Args:
        library: what `build` returns.
        dtype: the rows' dtype, for which it was built.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        declare(library, {"extend_attention": "PNI"})

    def extend_attention(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        tiles: DeviceTiles,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Attend as `extend_attention.reference`, by a table with tiles of KEYS keys.

        A thread has memory for one query tile: at D = 128, with 192 rows, 275 KB.

        Raises:
            ValueError: tensors or the table do not fit.
        """
        count, heads, size = rows[0].shape
        kv_heads = rows[1].shape[1]
        shape = tiles.shape
        group = heads // kv_heads
        if (shape.keys, shape.masked_keys) != (KEYS, KEYS) or tiles.rows.shape[1] != count:
            raise ValueError(f"a table of {tiles.rows.shape[1]} rows and {shape} does not fit")
        out = torch.empty(count, heads, size, dtype=self._dtype)
        by_slot = (x.transpose(0, 1) for x in pool)
        sides = [self._side(x, size) for x in (*rows, *by_slot, out)]
        tables = [tiles.rows, tiles.tiles, tiles.pool_tiles, tiles.masked]
        padded = -(-shape.rows * group // TOGETHER) * TOGETHER
        wide = -(-size // KEYS) * KEYS
        words = (
            2 * MOST * KEYS * wide + padded * (2 * wide + 1 + KEYS) + MOST * (shape.rows + TOGETHER)
        )
        threads = torch.get_num_threads()
        scratch = torch.empty(threads * words, dtype=torch.int32)
        problem = _Problem(
            *sides,
            *(x.data_ptr() for x in (*tables, scratch)),
            *(count, len(tiles.tiles), kv_heads, group, size),
            *(1 if shape.is_steady else MOST, tiles.window or 0),
            *(scale * LOG2_E, 0.0) if softcap is None else (2 * scale / softcap, softcap * LOG2_E),
        )
        self._library.extend_attention(ctypes.byref(problem), words, threads)
        return out

    def _side(self, x: Tensor, size: int) -> _Side:
        if x.dtype != self._dtype or x.shape[2] != size or (size > 1 and x.stride(2) != 1):
            raise ValueError(
                f"heads must be {size} {self._dtype} in order, got {x.dtype} {x.shape}"
            )
        return _Side(x.data_ptr(), x.stride(0), x.stride(1))
