"""Times of matrix products, as a library computes them that chooses among tiles."""

import math

from cost_model.cards import Card
from cost_model.published import Product

# Tiles that cuBLAS' kernels have (their names say so), and into how many parts it divides the sum.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)
LEAST_INNER = 256  # of a part


def product_cycles(work: Product, card: Card, overhead: float) -> float:
    """Return the cycles with the fastest tile: waves of tiles, each at the full rate.

    Args:
        work: the product.
        card: computes it.
        overhead: cycles of a tile outside of its loop; fitted.
    """
    return min(
        _cycles(work, card, overhead, tile, split)
        for tile in TILES
        for split in SPLITS
        if split == 1 or work.inner // split >= LEAST_INNER
    )


def _cycles(work: Product, card: Card, overhead: float, tile: tuple[int, int], split: int) -> float:
    rows, columns = tile
    tiles = math.ceil(work.rows / rows) * math.ceil(work.columns / columns) * split
    one = 2 * rows * columns * work.inner / split / card.flop_per_cycle + overhead
    return math.ceil(tiles / card.multiprocessors) * one
