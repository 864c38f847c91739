"""Routing of rows to experts in Triton: no number goes to the host, and no order depends on time.

Two kernels share the rows out in the same blocks. The first chooses the experts of a block's rows
and counts the rows of each; the second gives every choice its place, which is the first place of
its expert, plus the expert's rows in earlier blocks, plus those in earlier rows of the block. With
atomic additions places would differ from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.launch import INTERPRETER, arch_of, next_power_of_two
from gpuscore_kernels.routing import Routing

TILE = 4096  # rows times experts of a block: 16 numbers per thread
MOST_ROWS = 32  # of a block
WARPS = 8
BLOCKS = 16  # of counts that are summed at a time


def rows_of_block(arch: int, experts: int) -> int:
    """Rows of a block; it depends on the model, not on the batch."""
    if arch == INTERPRETER:
        return 8
    return max(1, min(MOST_ROWS, TILE // next_power_of_two(experts)))


# If specialised, Triton would compile different code for 1 row, multiples of 16 and other numbers.
@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    logits,
    filled,
    weights,
    chosen,
    counts,
    num_rows,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_FILLED: tl.constexpr,
):
    """Write weights and chosen, [num_rows, TOP_K], and counts [blocks, BLOCK]; -1 is no expert."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = num_rows
    if HAS_FILLED:
        count = tl.minimum(count, tl.load(filled))
    is_row = row < count
    expert = tl.arange(0, BLOCK)
    is_expert = (expert < EXPERTS)[None, :]
    start = logits + row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    z = tl.load(start, mask=is_row[:, None] & is_expert, other=0.0).to(tl.float32)
    z = tl.where(is_expert, z, float("-inf"))
    p = tl.exp(z - tl.max(z, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    # What is still to be chosen. A NaN would win or lose every comparison, depending on its side;
    # as 0 it is chosen among the rest, and its weight is NaN all the same.
    left = tl.where(is_expert, tl.where(p == p, p, 0.0), -1.0)
    slot = tl.arange(0, SLOTS)[None, :]
    picked = tl.zeros([ROWS, SLOTS], tl.int32)
    weight = tl.zeros([ROWS, SLOTS], tl.float32)
    for index in range(TOP_K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        hit = expert[None, :] == best[:, None]
        own = tl.sum(tl.where(hit, p, 0.0), axis=1)
        left = tl.where(hit, -1.0, left)
        picked = tl.where(slot == index, best[:, None], picked)
        weight = tl.where(slot == index, own[:, None], weight)
    if NORMALISE:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    place = row.to(tl.int64)[:, None] * TOP_K + slot
    inside = (row < num_rows)[:, None] & (slot < TOP_K)
    tl.store(weights + place, tl.where(is_row[:, None], weight, 0.0), mask=inside)
    tl.store(chosen + place, tl.where(is_row[:, None], picked, -1), mask=inside)
    taken = (left < 0.0) & is_expert & is_row[:, None]
    total = tl.sum(taken.to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0).to(tl.int64) * BLOCK + expert, total)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def place_kernel(
    chosen,
    counts,
    places,
    rows,
    starts,
    num_rows,
    num_blocks,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write places [num_rows, TOP_K], rows [num_rows * TOP_K] and starts [EXPERTS + 1]."""
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        entry = counts + block.to(tl.int64)[:, None] * BLOCK + expert[None, :]
        count = tl.load(entry, mask=(block < num_blocks)[:, None], other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((block < own)[:, None], count, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if own == 0:
        tl.store(starts + expert, ends - total, mask=expert < EXPERTS)
        tl.store(starts + 1 + expert, ends, mask=expert == EXPERTS - 1)
    row = own * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    entry = row.to(tl.int64) * TOP_K
    marks = tl.zeros([ROWS, BLOCK], tl.int32)
    for slot in range(TOP_K):
        mine = tl.load(chosen + entry + slot, mask=is_row, other=-1)
        marks += (mine[:, None] == expert[None, :]).to(tl.int32)
    place = (ends - total + before)[None, :] + tl.cumsum(marks, axis=0) - marks
    for slot in range(TOP_K):
        mine = tl.load(chosen + entry + slot, mask=is_row, other=-1)
        at = tl.sum(tl.where(mine[:, None] == expert[None, :], place, 0), axis=1)
        tl.store(places + entry + slot, tl.where(mine >= 0, at, -1), mask=is_row)
        tl.store(rows + at, row, mask=mine >= 0)


@chosen_once
def _launch_route(
    arch: int, experts: int, top_k: int, normalise: bool, has_filled: bool
) -> CachedLaunch:
    constants = _sizes(arch, experts, top_k) | {
        "SLOTS": next_power_of_two(top_k),
        "NORMALISE": normalise,
        "HAS_FILLED": has_filled,
    }
    return CachedLaunch(route_kernel, constants, {"num_warps": WARPS}, free=1, dtypes=(0, 1))


@chosen_once
def _launch_place(arch: int, experts: int, top_k: int) -> CachedLaunch:
    constants = _sizes(arch, experts, top_k) | {"BLOCKS": BLOCKS}
    return CachedLaunch(place_kernel, constants, {"num_warps": WARPS}, free=2, dtypes=())


def route(logits: Tensor, top_k: int, norm_top_k: bool, filled: Tensor | None) -> Routing:
    logits, device = logits.contiguous(), logits.device
    count, experts = logits.shape
    arch = arch_of(logits)
    sizes = _sizes(arch, experts, top_k)
    blocks = triton.cdiv(count, sizes["ROWS"])
    weights = torch.empty((count, top_k), dtype=torch.float32, device=device)
    chosen, places = (
        torch.empty((count, top_k), dtype=torch.int32, device=device) for _ in range(2)
    )
    rows = torch.empty(count * top_k, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    if count == 0:
        return Routing(weights, places, rows, starts.zero_())
    counts = torch.empty((blocks, sizes["BLOCK"]), dtype=torch.int32, device=device)
    filled_or_any = starts if filled is None else filled
    launch = _launch_route(arch, experts, top_k, norm_top_k, filled is not None)
    launch((blocks, 1), (logits, filled_or_any, weights, chosen, counts), (count,))
    launch = _launch_place(arch, experts, top_k)
    launch((blocks, 1), (chosen, counts, places, rows, starts), (count, blocks))
    return Routing(weights, places, rows, starts)


def _sizes(arch: int, experts: int, top_k: int) -> dict[str, int]:
    """Compile-time arguments that both kernels share."""
    block = next_power_of_two(experts)
    return {
        "EXPERTS": experts,
        "BLOCK": block,
        "ROWS": rows_of_block(arch, experts),
        "TOP_K": top_k,
    }
