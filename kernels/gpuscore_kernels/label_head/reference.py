"""The label head in plain torch, for any device, in tiles.

Neither function holds more than `max_tile` elements of logits or of gathered or converted weights
at a time.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from gpuscore_kernels.label_head.statistics import VocabStatistics

MAX_TILE = 1 << 22

# (rows [n, E] in float32, weights [v, E]) -> float32 [n, v]
Products: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# Converting a tile of half-precision weights and reading it back from memory takes longer than its
# product with few rows. So for up to FEW_ROWS rows a CPU converts pieces that its caches still hold
# when they are multiplied. Smaller pieces are a little faster on a quiet machine, and slower on a
# busy one, because threads wait for each other after each piece. With more rows the product hides
# the conversion. bench/LOG.md has the measurements.
FEW_ROWS = 64
CACHED_PIECE = 1 << 20  # elements, 4 MiB of float32


def label_logits(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    label_ids: Tensor,
    softcap: float | None,
    max_tile: int,
) -> Tensor:
    compute = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.empty(len(rows), dtype=compute, device=hidden.device)
    step = _power_of_two(max_tile // hidden.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        left = hidden.index_select(0, rows[part]).to(compute)
        right = weight.index_select(0, label_ids[part]).to(compute)
        logits[part] = _capped((left * right).sum(dim=1), softcap)
    return logits


def vocab_statistics(
    hidden: Tensor,
    weight: Tensor,
    num_top: int,
    softcap: float | None,
    max_tile: int,
    products: Products | None = None,
) -> VocabStatistics:
    num_rows, width = hidden.shape
    compute = torch.promote_types(hidden.dtype, torch.float32)
    hidden = hidden.to(compute)
    lse = torch.full((num_rows,), -torch.inf, dtype=compute, device=hidden.device)
    best = lse.new_full((num_rows, num_top), -torch.inf)
    best_ids = torch.zeros(num_rows, num_top, dtype=torch.int64, device=hidden.device)
    vocab_step, row_step = _tile(width, max_tile)
    in_pieces = hidden.device.type == "cpu" and num_rows <= FEW_ROWS
    multiply = products or few_products
    for v0 in range(0, weight.shape[0], vocab_step):
        tile = weight[v0 : v0 + vocab_step]  # [v, E]
        tile = tile if in_pieces else tile.to(compute)
        for n0 in range(0, num_rows, row_step):
            rows = slice(n0, n0 + row_step)
            logits = _capped(multiply(hidden[rows], tile), softcap)  # [n, v]
            lse[rows] = torch.logaddexp(lse[rows], torch.logsumexp(logits, dim=1))
            if num_top:
                values, ids = _largest(logits, min(num_top, logits.shape[1]))
                best[rows], best_ids[rows] = _merged(best[rows], best_ids[rows], values, ids + v0)
    return VocabStatistics(lse, *((best_ids, best) if num_top else (None, None)))


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's `count` largest logits, the largest first, and their columns.

    Of equal logits the first columns are chosen and come first.
    """
    if count == 1:
        return logits.max(dim=1, keepdim=True)
    values, columns = logits.topk(count, dim=1)
    # Which of equal logits `topk` finds is not defined. It matters for the smallest ones.
    least = values[:, -1:]
    tied = ((logits == least).sum(dim=1) > (values == least).sum(dim=1)).nonzero()[:, 0]
    if len(tied):
        every, order = logits[tied].sort(dim=1, descending=True, stable=True)
        values[tied], columns[tied] = every[:, :count], order[:, :count]
    columns, order = columns.sort(dim=1)
    values, by_value = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, by_value)


def _merged(best: Tensor, ids: Tensor, values: Tensor, new_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of those so far and of a later tile, both in the order of `_largest`."""
    count = best.shape[1]
    if count == 1:
        better = values > best
        return torch.where(better, values, best), torch.where(better, new_ids, ids)
    every, order = torch.cat((best, values), 1).sort(dim=1, descending=True, stable=True)
    return every[:, :count], torch.cat((ids, new_ids), 1).gather(1, order[:, :count])


def few_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden [n, E] @ weight.T [E, v]; weights of another dtype are converted in pieces."""
    if weight.dtype == hidden.dtype:
        return hidden @ weight.T
    vocab, width = weight.shape
    step = min(vocab, max(1, CACHED_PIECE // width))
    logits, buffer = hidden.new_empty(len(hidden), vocab), hidden.new_empty(step, width)
    for start in range(0, vocab, step):
        piece = weight[start : start + step]
        converted = buffer[: len(piece)].copy_(piece)
        torch.mm(hidden, converted.T, out=logits[:, start : start + step])
    return logits


def tile_shapes(num_rows: int, vocab: int, width: int) -> set[tuple[int, int]]:
    """Shapes [n, v] of the tiles of logits in `vocab_statistics`, for 2^k rows of this width."""
    vocab_step, row_step = _tile(width, MAX_TILE)
    rows = min(num_rows, row_step)
    return {(rows, v) for v in (min(vocab, vocab_step), vocab % vocab_step) if v}


def repeating_rows(width: int) -> int:
    """Rows of the vocabulary after which the memory of `vocab_statistics` grows no more.

    A tile may be converted, or its logits be computed, while those of the tile before are held.
    """
    return 3 * _tile(width, MAX_TILE)[0]


def _tile(width: int, max_tile: int) -> tuple[int, int]:
    vocab_step = max(1, max_tile // width)
    return vocab_step, _power_of_two(max_tile // vocab_step)


def _power_of_two(most: int) -> int:
    """Largest power of two up to `most`, at least 1; so 2^n rows are divided into equal tiles."""
    return 1 << (max(1, most).bit_length() - 1)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
