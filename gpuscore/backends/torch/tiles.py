"""Rows of a batch all at once, or in tiles of one fixed number of rows.

Matrix products, reductions and even element-wise functions need not give a row the same bits when
the number of rows changes: libraries choose other loops, and vectors end elsewhere. In tiles of one
shape they do, so that a row's result does not depend on what else is in the batch (Thinking
Machines, "Defeating nondeterminism in LLM inference", 2025).
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

# A function of tensors whose first dimension is the rows, each row on its own; None stays None.
Stage: TypeAlias = Callable[..., tuple[Tensor, ...]]
ByRows: TypeAlias = Callable[..., tuple[Tensor, ...]]  # (stage, *its tensors)


def all_at_once(stage: Stage, *rows: Tensor | None) -> tuple[Tensor, ...]:
    """`stage` of all rows in one call."""
    return stage(*rows)


def in_tiles(size: int) -> ByRows:
    """What applies a stage to `size` rows at a time; the last tile is filled up with zeros."""

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
