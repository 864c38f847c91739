"""Tiles of the experts' products, by architecture and dtype."""

from dataclasses import dataclass

import torch

from gpuscore_kernels.launch import INTERPRETER, LaunchConfig, next_power_of_two


@dataclass(frozen=True, slots=True)
class ProductTiles(LaunchConfig):
    """Tiles of the products; see `LaunchConfig`."""

    BLOCK_M: int  # rows of one expert
    BLOCK_N: int  # columns of a product
    BLOCK_K: int  # elements of a dot product at a time

    def constants(self, columns: int, width: int, experts: int) -> dict[str, object]:
        """Return the compile-time arguments of a product that is [places, columns], of rows of
        `width` elements."""
        return self.sizes() | {
            "EXPERTS": experts,
            "BLOCK": next_power_of_two(experts),
            "EVEN_N": columns % self.BLOCK_N == 0,
            "EVEN_K": width % self.BLOCK_K == 0,
        }


def config_for(arch: int, dtype: torch.dtype) -> ProductTiles:
    """Return the configuration. A tile of 128 x 128 does 64 operations per byte that it copies,
    one of 64 x 128 only 43. Three stages take 64 KiB of shared memory, on sm_90 96, where two
    blocks fit on a multiprocessor: one multiplies while the other looks for its tile or stores it.
    With 128 x 256 only one would, and the first kernel would take all 255 registers."""
    if arch == INTERPRETER:
        return ProductTiles(16, 32, 16, num_warps=4, num_stages=1)
    if dtype == torch.float32:  # no tensor cores, so accumulators and operands are in registers
        return ProductTiles(64, 64, 32, num_warps=8, num_stages=2)
    return ProductTiles(128, 128, 64, num_warps=8, num_stages=3)


def most_tiles(places: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` rows that any division of the places among experts has."""
    full = min(experts, places)  # experts that have a place, and so at least one tile
    return full + (places - full) // rows
