"""The label head in Triton.

The log-sum-exp takes two kernels. The first multiplies rows with one slice of the vocabulary, tile
by tile, and keeps each row's running maximum, sum and best tokens. These are none, one, or MAX_TOP
in no order, with -inf in unused places. The second combines a row's slices in a fixed order. Cut
Cross-Entropy (arXiv 2411.09009) does the same in one kernel with locks, so its order of summing
varies.
"""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.label_head import MAX_TOP, TILE_ROWS, VocabStatistics
from gpuscore_kernels.launch import INTERPRETER, arch_of


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles of the kernel, named as its compile-time arguments, and how it is launched.

    The choice depends on the number of rows, and so do a result's bits. With --deterministic that
    number is always the same.
    """

    BLOCK_M: int  # rows
    BLOCK_N: int  # tokens
    BLOCK_K: int  # elements of a row at a time
    SLICES: int  # slices of the vocabulary, one program each; a power of two
    num_warps: int
    num_stages: int

    def sizes(self) -> dict[str, int]:
        """Compile-time arguments of the kernel."""
        return {name: value for name, value in asdict(self).items() if name.isupper()}


@chosen_once
def config_for(arch: int, dtype: torch.dtype, few: bool) -> Config:
    """Return the configuration for up to TILE_ROWS rows (`few`) or more.

    Three stages of bfloat16 take 64 KiB of shared memory, or 96 KiB on sm_90; every architecture
    has 99 KiB. So a product runs while the next tiles are copied. Few rows take as long as reading
    the weight. A smaller tile of rows leaves 72 KiB for the weight, so 48 KiB are copied during a
    product instead of 16 KiB. It also needs an eighth of the exponentials, during which nothing is
    copied.
    """
    if arch == INTERPRETER:
        return Config(16, 32, 16, SLICES=4, num_warps=4, num_stages=1)
    # Without tensor cores, accumulators and operands are in registers. With 8 warps, two blocks
    # would share a multiprocessor; a thread then gets only 128 registers, and spills some.
    if dtype == torch.float32:
        return Config(64, 64, 32, SLICES=128, num_warps=16, num_stages=2)
    if few:
        return Config(TILE_ROWS, 128, 64, SLICES=128, num_warps=4, num_stages=5)
    return Config(128, 128, 64, SLICES=128, num_warps=8, num_stages=3)


BEST_WARPS = 4  # a row has thousands of candidates if a request asks for several tokens
NO_ID = tl.constexpr(2**31 - 1)
LABEL_BLOCK = 1024  # elements of a dot product at a time
# Rows that are computed at a time if several best tokens are kept. Each slice of each row keeps as
# many, which takes 20 MiB.
BEST_ROWS = 1024


@triton.jit
def _capped(logits, softcap):
    """Return softcap * tanh(logits / softcap)."""
    small = tl.exp(-2.0 * tl.abs(logits / softcap))
    size = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(logits < 0, -size, size)


@triton.jit
def label_logits_kernel(
    hidden,
    weight,
    rows,
    label_ids,
    out,
    hidden_stride,
    softcap,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Compute one label's logit in each program: the dot product of a row and a weight, BLOCK
    elements at a time."""
    label = tl.program_id(0)
    x = hidden + tl.load(rows + label).to(tl.int64) * hidden_stride
    w = weight + tl.load(label_ids + label).to(tl.int64) * WIDTH
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < WIDTH
        a = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
        acc += a * tl.load(w + offs, mask=mask, other=0.0).to(tl.float32)
    logit = tl.sum(acc, axis=0)
    if HAS_CAP:
        logit = _capped(logit, softcap)
    tl.store(out + label, logit)


@triton.jit
def no_best(ROWS: tl.constexpr, TOP: tl.constexpr):
    """Return logits and ids, each [ROWS, columns], of rows without any token yet.

    Columns after TOP pad to a power of two. They hold infinity, so no token replaces them.
    """
    column = tl.arange(0, triton.next_power_of_2(TOP))[None, :]
    free = tl.where(column < TOP, float("-inf"), float("inf"))
    top = tl.zeros([ROWS, column.shape[1]], tl.float32) + free
    return top, tl.zeros([ROWS, column.shape[1]], tl.int32) - 1 - column


@triton.jit
def with_best(top, top_ids, logits, peak, first):
    """Replace the least of each row's best tokens by larger ones of a later tile, one at a time.

    Among equal tokens the highest id is replaced first, and a later token never replaces an equal
    token.

    Args:
        top, top_ids: [rows, columns], of the tiles so far.
        logits: [rows, tokens] of this tile, whose first token is `first`.
        peak: [rows], the largest of them.
    """
    token = tl.arange(0, logits.shape[1])[None, :]
    least = tl.min(top, axis=1)
    while tl.max((peak > least).to(tl.int32), axis=0) > 0:
        enters = (peak > least)[:, None]
        winner = tl.argmax(logits, axis=1, tie_break_left=True)[:, None]
        leaves = top == least[:, None]
        last = tl.max(tl.where(leaves, top_ids, -top.shape[1] - 1), axis=1)
        leaves = leaves & (top_ids == last[:, None]) & enters
        top = tl.where(leaves, peak[:, None], top)
        top_ids = tl.where(leaves, first + winner, top_ids)
        logits = tl.where((token == winner) & enters, float("-inf"), logits)
        peak = tl.max(logits, axis=1)
        least = tl.min(top, axis=1)
    return top, top_ids


# If specialised, Triton would compile different code for 1 row, multiples of 16 and other numbers.
@triton.jit(do_not_specialize=["num_rows"])
def slice_statistics_kernel(
    hidden,
    weight,
    rows,
    peaks,
    sums,
    best_ids,
    best_logits,
    num_rows,
    hidden_stride,
    width,
    softcap,
    VOCAB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TOP: tl.constexpr,
):
    """Write peaks, sums and best_ids, each [num_rows, SLICES]; programs of a slice run together.

    Each program takes BLOCK_M rows and one slice of the vocabulary. For every BLOCK_N of its tokens
    it multiplies rows and weights, BLOCK_K elements at a time. Each tile of logits moves the
    running maximum m_i, and the sum of exponentials l_i is rescaled and added to.

    With TOP over 1, best_ids and best_logits are [num_rows, SLICES, TOP], in no order. A slice with
    fewer tokens has -inf in unused places.

    `width` is not a compile-time constant, so that Triton does not unroll the inner loop over it.
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows
    source = tl.load(rows + offs_m, mask=mask_m, other=0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    left = hidden + source[:, None] * hidden_stride + offs_k[None, :]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    best = tl.zeros([BLOCK_M], tl.int32)
    if TOP > 1:
        top, top_ids = no_best(BLOCK_M, TOP)
    tiles: tl.constexpr = (VOCAB + BLOCK_N - 1) // BLOCK_N
    per_slice: tl.constexpr = (tiles + SLICES - 1) // SLICES
    first = tl.program_id(1) * per_slice
    for tile in range(first, tl.minimum(first + per_slice, tiles)):
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < VOCAB
        right = weight + offs_n.to(tl.int64)[:, None] * width + offs_k[None, :]
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_K):
            a_mask = mask_m[:, None]
            b_mask = mask_n[:, None]
            if not EVEN_K:
                inside = (start + offs_k < width)[None, :]
                a_mask = a_mask & inside
                b_mask = b_mask & inside
            a = tl.load(left + start, mask=a_mask, other=0.0)
            b = tl.load(right + start, mask=b_mask, other=0.0)
            logits = tl.dot(a, tl.trans(b), logits, input_precision="ieee")
        if HAS_CAP:
            logits = _capped(logits, softcap)
        logits = tl.where(mask_n[None, :], logits, float("-inf"))
        tile_peak = tl.max(logits, axis=1)
        if TOP == 1:
            tile_best = tile * BLOCK_N + tl.argmax(logits, axis=1, tie_break_left=True)
            best = tl.where(tile_peak > m_i, tile_best, best)
        m_ij = tl.maximum(m_i, tile_peak)
        tile_sum = tl.sum(tl.exp(logits - m_ij[:, None]), axis=1)
        l_i = l_i * tl.exp(m_i - m_ij) + tile_sum
        m_i = m_ij
        if TOP > 1:
            top, top_ids = with_best(top, top_ids, logits, tile_peak, first=tile * BLOCK_N)
    place = offs_m.to(tl.int64) * SLICES + tl.program_id(1)
    tl.store(peaks + place, m_i, mask=mask_m)
    tl.store(sums + place, l_i, mask=mask_m)
    if TOP == 1:
        tl.store(best_ids + place, best, mask=mask_m)
    if TOP > 1:
        column = tl.arange(0, triton.next_power_of_2(TOP))[None, :]
        places = place[:, None] * TOP + column
        is_place = mask_m[:, None] & (column < TOP)
        tl.store(best_ids + places, top_ids, mask=is_place)
        tl.store(best_logits + places, top, mask=is_place)


@triton.jit
def merge_slices_kernel(
    peaks,
    sums,
    best_ids,
    best_logits,
    lse,
    top_ids,
    top_logits,
    SLICES: tl.constexpr,
    TOP: tl.constexpr,
):
    """Combine a row's slices and, if TOP is not 0, their best tokens; write the TOP best, the
    largest first. A slice without tokens has peak -inf, sum 0."""
    row = tl.program_id(0).to(tl.int64)
    place = row * SLICES + tl.arange(0, SLICES)
    peak = tl.load(peaks + place)
    highest = tl.max(peak, axis=0)
    total = tl.sum(tl.load(sums + place) * tl.exp(peak - highest), axis=0)
    tl.store(lse + row, highest + tl.log(total))
    if TOP > 0:
        column = tl.arange(0, triton.next_power_of_2(TOP))[None, :]
        places = place[:, None] * TOP + column
        inside = column < TOP
        ids = tl.load(best_ids + places, mask=inside, other=-1)
        logits = tl.load(best_logits + places, mask=inside, other=float("-inf"))
        for rank in range(TOP):
            best = tl.max(tl.max(logits, axis=1), axis=0)
            winner = tl.min(tl.min(tl.where(logits == best, ids, NO_ID), axis=1), axis=0)
            tl.store(top_ids + row * TOP + rank, tl.maximum(winner, 0))  # below 0: no token is left
            tl.store(top_logits + row * TOP + rank, best)
            logits = tl.where(ids == winner, float("-inf"), logits)


@chosen_once
def _launch_labels(width: int, has_cap: bool) -> CachedLaunch:
    block = min(LABEL_BLOCK, triton.next_power_of_2(width))
    constants = {"WIDTH": width, "BLOCK": block, "HAS_CAP": has_cap}
    return CachedLaunch(label_logits_kernel, constants, {"num_warps": 4}, dtypes=(0, 2, 3))


@chosen_once
def _launch_slices(config: Config, vocab: int, even: bool, has_cap: bool, top: int) -> CachedLaunch:
    constants = {"VOCAB": vocab, "EVEN_K": even, "HAS_CAP": has_cap, "TOP": top}
    return CachedLaunch(
        slice_statistics_kernel,
        constants | config.sizes(),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        unspecialized=1,
        dtypes=(0, 2),
    )


@chosen_once
def _launch_merge(slices: int, top: int) -> CachedLaunch:
    constants = {"SLICES": slices, "TOP": top}
    options = {"num_warps": BEST_WARPS if top > 1 else 1}
    return CachedLaunch(merge_slices_kernel, constants, options, dtypes=())


def label_logits(
    hidden: Tensor, weight: Tensor, rows: Tensor, label_ids: Tensor, softcap: float | None
) -> Tensor:
    hidden = _rows_whole(hidden)
    weight = weight.contiguous()
    width = hidden.shape[1]
    count = rows.shape[0]  # a tensor's `len` is a function in Python
    out = torch.empty(count, dtype=torch.float32, device=hidden.device)
    if count == 0:
        return out
    _launch_labels(width, softcap is not None)(
        (count, 1),
        (hidden, weight, rows.contiguous(), label_ids.contiguous(), out),
        (hidden.stride(0), softcap or 1.0),
    )
    return out


def vocab_statistics(
    hidden: Tensor, weight: Tensor, rows: Tensor | None, num_top: int, softcap: float | None
) -> VocabStatistics:
    hidden = _rows_whole(hidden)
    weight = weight.contiguous()
    rows = torch.arange(hidden.shape[0], device=hidden.device) if rows is None else rows
    count = rows.shape[0]
    if num_top <= 1 or count <= BEST_ROWS:
        return _statistics(hidden, weight, rows, num_top, softcap=softcap)
    parts = [
        _statistics(hidden, weight, rows[start : start + BEST_ROWS], num_top, softcap=softcap)
        for start in range(0, count, BEST_ROWS)
    ]
    return VocabStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _statistics(
    hidden: Tensor, weight: Tensor, rows: Tensor, num_top: int, softcap: float | None
) -> VocabStatistics:
    count = rows.shape[0]
    device = hidden.device
    config = config_for(arch_of(hidden), hidden.dtype, count <= TILE_ROWS)
    top = num_top if num_top <= 1 else MAX_TOP  # one variant of the kernel for all numbers over 1
    lse = top_ids = top_logits = torch.empty(count, dtype=torch.float32, device=device)
    if top:
        top_ids = torch.empty((count, top), dtype=torch.int64, device=device)
        top_logits = torch.empty((count, top), dtype=torch.float32, device=device)
    if count:
        peaks = torch.empty((count, config.SLICES), dtype=torch.float32, device=device)
        sums = torch.empty_like(peaks)
        best_logits = peaks if top <= 1 else peaks.new_empty((*peaks.shape, top))
        best_ids = torch.empty_like(best_logits, dtype=torch.int32) if top else peaks
        of_slices = peaks, sums, best_ids, best_logits
        even = weight.shape[1] % config.BLOCK_K == 0
        _launch_slices(config, weight.shape[0], even, softcap is not None, top=top)(
            (-(-count // config.BLOCK_M), config.SLICES),
            (hidden, weight, rows.contiguous(), *of_slices),
            (count, hidden.stride(0), weight.shape[1], softcap or 1.0),
        )
        merged = lse, top_ids, top_logits
        _launch_merge(config.SLICES, top)((count, 1), (*of_slices, *merged), ())
    if not num_top:
        return VocabStatistics(lse, None, None)
    return VocabStatistics(lse, top_ids[:, :num_top], top_logits[:, :num_top])


def _rows_whole(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
