"""The label head: logits of a few label tokens, and the full-vocabulary log-sum-exp.

All products are float32 (float64 for float64 inputs), and the [N, V] logits never exist as a whole.
The final norm is already applied to the rows: the decoder computes it together with the last sum of
the residual stream (`add_rms_norm`).

In plain torch, no more than `MAX_TILE` elements of logits or of gathered or converted weights are
held at a time.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpuscore_kernels import Implementation

MAX_TILE = 1 << 22
MAX_TOP = 20  # best tokens of a row

# (rows [n, E], weights [v, E]) -> float32 [n, v]; float64 of float64
Products: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# Converting a tile of half-precision weights and reading it back from memory takes longer than its
# product with few rows, so pieces are converted that a CPU's caches still hold when they are
# multiplied. Smaller pieces are a little faster on a quiet machine, and slower on a busy one,
# because threads wait for each other after each piece. bench/LOG.md has the measurements.
CACHED_PIECE = 1 << 20  # elements, 4 MiB of float32

# In Triton, the log-sum-exp of up to so many rows uses smaller tiles. The smallest product on
# tensor cores has this many rows.
TILE_ROWS = 16


class VocabStatistics(NamedTuple):
    """Statistics of each row over the vocabulary; see `vocab_statistics`."""

    lse: Tensor
    top_ids: Tensor | None
    top_logits: Tensor | None


def label_logits(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    label_ids: Tensor,
    *,
    softcap: float | None = None,
    impl: Implementation,
) -> Tensor:
    """Return the logit of token `label_ids[i]` in row `rows[i]`; reads only these weight rows.

    Args:
        hidden: [N, E] after the final norm.
        weight: [V, E] of the LM head.
        rows: int [L], 0 <= rows < N.
        label_ids: int [L], 0 <= label_ids < V.
        softcap: logits z become softcap * tanh(z / softcap).
        impl: "reference" (any device) or "triton".

    Returns:
        float [L]. Each is one dot product, so it does not depend on the other rows.
    """
    if impl == "triton":
        from gpuscore_kernels.label_head import triton

        return triton.label_logits(hidden, weight, rows, label_ids, softcap=softcap)
    compute = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.empty(len(rows), dtype=compute, device=hidden.device)
    hidden = hidden.to(compute)
    step = _power_of_two(CACHED_PIECE // (2 * hidden.shape[1]))  # the caches hold both buffers
    products = hidden.new_empty(min(step, len(rows)), hidden.shape[1])
    weights = weight.new_empty(products.shape)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        count = len(rows[part])
        left = torch.index_select(hidden, 0, rows[part], out=products[:count])
        right = torch.index_select(weight, 0, label_ids[part], out=weights[:count])
        left *= right.to(compute)
        logits[part] = _capped(left.sum(dim=1), softcap)
    return logits


def vocab_statistics(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor | None = None,
    *,
    num_top: int,
    softcap: float | None = None,
    products: Products | None = None,
    impl: Implementation,
) -> VocabStatistics:
    """Return each row's log-sum-exp over all V logits, and the largest (lower ids on a tie).

    Args:
        hidden: [N, E] after the final norm.
        weight: [V, E] of the LM head.
        rows: int [M], rows of `hidden` to compute; None = all.
        num_top: number of best tokens to return with their logits, at most MAX_TOP.
        softcap: logits z become softcap * tanh(z / softcap).
        products: multiplies rows with tiles of weights, in place of the reference's `few_products`.
        impl: "reference" (any device) or "triton".

    Returns:
        lse float [M], natural log; top_ids int64 [M, num_top] and top_logits float [M, num_top],
        the largest first, or None. Places after the V-th hold -inf. The top logits went into the
        log-sum-exp as they are; `label_logits` sums the same tokens' products in another order.
        With "triton" the vocabulary is divided into slices, whose number and order of summing
        depend only on the device's architecture, the dtype, and whether rows are over TILE_ROWS.

    Raises:
        ValueError: `num_top` is too large.
    """
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"{num_top} top tokens, the limit is {MAX_TOP}")
    if impl == "triton":
        from gpuscore_kernels.label_head import triton

        return triton.vocab_statistics(hidden, weight, rows, num_top, softcap=softcap)
    hidden = hidden if rows is None else hidden.index_select(0, rows)
    num_rows, width = hidden.shape
    compute = torch.promote_types(hidden.dtype, torch.float32)
    lse = torch.full((num_rows,), -torch.inf, dtype=compute, device=hidden.device)
    best = lse.new_full((num_rows, num_top), -torch.inf)
    best_ids = torch.zeros(num_rows, num_top, dtype=torch.int64, device=hidden.device)
    vocab_step, row_step = _tile(width)
    multiply = products or few_products
    for v0 in range(0, weight.shape[0], vocab_step):
        tile = weight[v0 : v0 + vocab_step]  # [v, E]
        for n0 in range(0, num_rows, row_step):
            part = slice(n0, n0 + row_step)
            logits = _capped(multiply(hidden[part], tile), softcap)  # [n, v]
            lse[part] = torch.logaddexp(lse[part], torch.logsumexp(logits, dim=1))
            if num_top:
                values, ids = _largest(logits, min(num_top, logits.shape[1]))
                best[part], best_ids[part] = _merged(best[part], best_ids[part], values, ids + v0)
    return VocabStatistics(lse, *((best_ids, best) if num_top else (None, None)))


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's `count` largest logits, the largest first, and their columns.

    Among equal logits the first columns are chosen and come first.
    """
    if count == 1:
        return logits.max(dim=1, keepdim=True)
    values, columns = logits.topk(count, dim=1)
    # Which of equal logits `topk` finds is not defined. It matters for the smallest ones.
    least = values[:, -1:]
    tied = ((logits == least).sum(dim=1) > (values == least).sum(dim=1)).nonzero()[:, 0]
    if len(tied):
        every, order = logits[tied].sort(dim=1, descending=True, stable=True)
        values[tied] = every[:, :count]
        columns[tied] = order[:, :count]
    columns, order = columns.sort(dim=1)
    values, by_value = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, by_value)


def _merged(best: Tensor, ids: Tensor, values: Tensor, new_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the largest so far with a later tile's largest, both in the order of `_largest`."""
    count = best.shape[1]
    if count == 1:
        better = values > best
        return torch.where(better, values, best), torch.where(better, new_ids, ids)
    every, order = torch.cat((best, values), 1).sort(dim=1, descending=True, stable=True)
    return every[:, :count], torch.cat((ids, new_ids), 1).gather(1, order[:, :count])


def few_products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden [n, E] @ weight.T [E, v], at least in float32; weights of another dtype are
    converted in pieces."""
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if weight.dtype == hidden.dtype:
        return hidden @ weight.T
    vocab, width = weight.shape
    step = min(vocab, max(1, CACHED_PIECE // width))
    logits = hidden.new_empty(len(hidden), vocab)
    buffer = hidden.new_empty(step, width)
    for start in range(0, vocab, step):
        piece = weight[start : start + step]
        converted = buffer[: len(piece)].copy_(piece)
        torch.mm(hidden, converted.T, out=logits[:, start : start + step])
    return logits


def tile_shapes(num_rows: int, vocab: int, width: int) -> set[tuple[int, int]]:
    """Shapes [n, v] of the tiles of logits in `vocab_statistics`, for 2^k rows of this width."""
    vocab_step, row_step = _tile(width)
    rows = min(num_rows, row_step)
    return {(rows, v) for v in (min(vocab, vocab_step), vocab % vocab_step) if v}


def repeating_rows(width: int) -> int:
    """Rows of the vocabulary after which the memory of `vocab_statistics` grows no more.

    A tile may be converted, or its logits computed, while the logits of the tile before are held.
    """
    return 3 * _tile(width)[0]


def _tile(width: int) -> tuple[int, int]:
    vocab_step = max(1, MAX_TILE // width)
    return vocab_step, _power_of_two(MAX_TILE // vocab_step)


def _power_of_two(most: int) -> int:
    """Largest power of two up to `most`, at least 1; so 2^n rows are divided into equal tiles."""
    return 1 << (max(1, most).bit_length() - 1)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
