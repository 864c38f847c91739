"""Times of attention kernels whose code is not at hand, from their tiles.

Instructions per iteration are counted from the algorithm (FlashAttention-2, arXiv 2307.08691):
every score is scaled, compared, exponentiated, added and rounded, and every row of the result is
scaled once.
"""

import math
from functools import cache

from cost_model.cards import Card
from cost_model.cycles import Loop, Overlap, iteration
from cost_model.published import Attention, Tile

# Instructions of a thread for one score: in our own kernel's code on sm_90 (128 x 64, 8 warps), 353
# per warp and iteration, less 64 for the result, 12 for products and some 60 for copies, over 32
# scores of a thread.
PER_SCORE = 6.8
PER_MASKED_SCORE = 3.0  # compare, and select twice
MMA_FLOP = 4096  # of one mma.sync m16n8k16
WITH_LOADS = 1.5  # instructions per mma.sync: half of a load from shared memory for each
THREADS = 32


@cache
def tile_loop(tile: Tile, dim: int, masked: bool, tensor_cores: str) -> Loop:
    """Return one iteration over a tile of keys of 16-bit numbers."""
    scores = tile.rows * tile.keys
    flop = 4.0 * scores * dim
    per_score = PER_SCORE + tile.more_per_score + (PER_MASKED_SCORE if masked else 0)
    products = 0 if tensor_cores == "wgmma" else WITH_LOADS * flop / MMA_FLOP
    return Loop(
        flop=flop,
        instructions=(scores * per_score + tile.rows * dim) / THREADS + products,
        special=scores + tile.rows,
        copied=4.0 * tile.keys * dim,
        trips=0 if tile.in_flight else 1,
    )


def attention_cycles(work: Attention, card: Card, overlap: Overlap) -> float:
    """Return cycles from the first block's start to the last one's end."""
    tile = work.tile
    per_head = math.ceil(work.tokens / tile.rows)
    blocks = per_head * work.heads * work.batch
    plain, masked = (
        iteration(tile_loop(tile, work.dim, mask, card.tensor_cores), card, overlap)
        for mask in (tile.all_masked, True)
    )
    if not work.causal:
        one = overlap.startup + math.ceil(work.tokens / tile.keys) * plain
        return math.ceil(blocks / card.multiprocessors) * one
    diagonal = max(1.0, tile.rows / tile.keys)
    longest = overlap.startup + (per_head - 1) * tile.rows / tile.keys * plain + diagonal * masked
    shortest = overlap.startup + diagonal * masked
    # Blocks of all lengths, in an order that leaves long ones for the end: half of one on average.
    mean = blocks * (longest + shortest) / 2 / card.multiprocessors
    return max(longest, mean + longest / 2)
