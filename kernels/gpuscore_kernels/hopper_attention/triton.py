"""Lists of blocks of keys in Triton: a program per tile of rows."""

import triton
import triton.language as tl

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once

STEP = 16  # blocks that a program looks at together


@triton.jit
def noted(counts, places, tile, blocks, so_far, block, chosen):
    """Add the chosen blocks to a tile's list of `so_far` blocks; return its length."""
    place = so_far + tl.cumsum(chosen, 0) - chosen
    tl.store(places + tile * blocks + place, block, mask=chosen > 0)
    so_far += tl.sum(chosen, 0)
    tl.store(counts + tile, so_far)
    return so_far


@triton.jit(do_not_specialize=["rows", "blocks"])
def block_lists_kernel(
    numbers,  # int32 [2, blocks * KEYS]
    masked_count,
    masked,
    full_count,
    full,
    rows,
    blocks,
    TOKENS: tl.constexpr,  # rows of a tile
    KEYS: tl.constexpr,  # of a block
    STEP: tl.constexpr,
):
    tile = tl.program_id(0)
    first = tile * TOKENS
    behind = tl.minimum(first + TOKENS, rows)
    num_masked = tl.zeros([], tl.int32)
    num_full = tl.zeros([], tl.int32)
    for start in tl.range(0, blocks, STEP):
        block = start + tl.arange(0, STEP)
        key = block[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
        there = (block < blocks)[:, None]
        begin = tl.load(numbers + key, mask=there, other=0)
        end = tl.load(numbers + blocks * KEYS + key, mask=there, other=0)
        every = tl.min(((begin <= first) & (end >= behind)).to(tl.int32), 1)
        some = (begin < behind) & (end > first) & (begin < end)
        some = tl.max(some.to(tl.int32), 1) - every
        num_full = noted(full_count, full, tile, blocks, num_full, block, every)
        num_masked = noted(masked_count, masked, tile, blocks, num_masked, block, some)


@chosen_once
def launch(tokens: int, keys: int) -> CachedLaunch:
    """Return the launch for tiles and blocks of these sizes."""
    constants = {"TOKENS": tokens, "KEYS": keys, "STEP": STEP}
    return CachedLaunch(block_lists_kernel, constants, {"num_warps": 8}, free=2, dtypes=())
