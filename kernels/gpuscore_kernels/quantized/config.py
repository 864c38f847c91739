"""Tiles of the int8 product."""

from dataclasses import dataclass

from gpuscore_kernels.launch import INTERPRETER, LaunchConfig

FEW_ROWS = 512  # up to this many, tiles are small, so that there are enough of them for a device


@dataclass(frozen=True, slots=True)
class Int8Tiles(LaunchConfig):
    """Tiles of the product. Sums of integers are exact, so its bits do not depend on them."""

    BLOCK_M: int  # rows
    BLOCK_N: int  # columns of the result
    BLOCK_K: int  # elements of a row at a time, a byte each


def config_for(arch: int, rows: int) -> Int8Tiles:
    """Return the configuration.

    Chosen by shared memory and bytes copied; only sm_90's have run on a card. A tile of 128
    x 128 does 128 operations per byte that it copies, one of 64 x 64 half as many. It takes 96 KiB,
    so that two blocks fit on a multiprocessor of sm_90. Elsewhere registers leave room for one, and
    sm_89 and sm_120 have 99 KiB; a stage there is a buffer less.
    """
    if arch == INTERPRETER:
        return Int8Tiles(16, 32, 32, num_warps=4, num_stages=1)
    if rows <= FEW_ROWS:
        return Int8Tiles(64, 64, 128, num_warps=4, num_stages=4)
    return Int8Tiles(128, 128, 128, num_warps=8, num_stages=3 if arch == 90 else 4)
