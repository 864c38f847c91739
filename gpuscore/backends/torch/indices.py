"""Indices of a batch's rows or of KV slots: slices where they are consecutive."""

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Rows: TypeAlias = Tensor | slice  # slices are read and written in place


def rows_at(indices: np.ndarray, device: torch.device) -> Rows:
    """Return the slice of consecutive indices, else the indices as a tensor."""
    run = run_of(indices)
    return index_of(indices, device) if run is None else run


def run_of(indices: np.ndarray) -> slice | None:
    """Return the slice of consecutive indices [n]; None if there are none, or they are not."""
    if len(indices) == 0 or (np.diff(indices) != 1).any():
        return None
    return slice(int(indices[0]), int(indices[-1]) + 1)


def index_of(values: np.ndarray, device: torch.device) -> Tensor:
    """Return the indices as int64 on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
