"""Tile tables on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpuscore_kernels.extend_attention.layout import TileShape, TileTable

ALIGNED = 16  # Triton compiles a kernel once more for pointers that are not 16 bytes aligned


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """The arrays of a `TileTable`, int32."""

    shape: TileShape
    window: int | None
    own_only: bool
    rows: Tensor
    tiles: Tensor
    pool_tiles: Tensor
    masked: Tensor


def upload(tables: Sequence[TileTable], device: torch.device) -> list[DeviceTiles]:
    """All tables in one copy, which does not wait for the device."""
    arrays = [a for t in tables for a in (t.rows, t.tiles, t.pool_tiles, t.masked)]
    sizes = [-(-array.size // ALIGNED) * ALIGNED for array in arrays]
    packed = np.zeros(sum(sizes), np.int32)
    starts = np.cumsum([0, *sizes]).tolist()
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.reshape(-1)
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        host = host.pin_memory()
    whole = host.to(device, non_blocking=True)
    views = [
        whole[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
    return [
        DeviceTiles(table.shape, table.window, table.own_only, *views[4 * i : 4 * i + 4])
        for i, table in enumerate(tables)
    ]
