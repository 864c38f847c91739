"""Computation of a batch's rows all at once, or in tiles of a fixed number of rows.

Matrix products, reductions and even element-wise functions need not give a row the same bits when
the number of rows changes: libraries choose other loops, and vectors end elsewhere. With tiles of
one shape they do, so a row's result does not depend on the rest of the batch (Thinking Machines,
"Defeating nondeterminism in LLM inference", 2025).
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

# A function that computes each row on its own; the first dimension of its tensors is the rows. An
# argument may be None.
Stage: TypeAlias = Callable[..., tuple[Tensor, ...]]
ByRows: TypeAlias = Callable[..., tuple[Tensor, ...]]  # (stage, *its tensors)


def all_at_once(stage: Stage, *rows: Tensor | None) -> tuple[Tensor, ...]:
    """Apply `stage` to all rows in one call."""
    return stage(*rows)


def in_tiles(size: int) -> ByRows:
    """Return a function that applies a stage to `size` rows at a time; zeros pad the last tile."""

    def apply(stage: Stage, first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        count = len(first)
        if count == 0:
            return stage(first, *others)
        tiles = [
            stage(*(_tile(x, start, size) for x in (first, *others)))
            for start in range(0, count, size)
        ]
        return tuple(torch.cat(parts)[:count] for parts in zip(*tiles, strict=True))

    return apply


def _tile(rows: Tensor | None, start: int, size: int) -> Tensor | None:
    if rows is None:
        return None
    tile = rows[start : start + size]
    missing = size - len(tile)
    if missing == 0:
        return tile
    return functional.pad(tile, (0, 0) * (tile.dim() - 1) + (0, missing))
