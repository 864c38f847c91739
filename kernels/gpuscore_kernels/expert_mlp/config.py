"""Tiles of the experts' products, by architecture and dtype."""

from dataclasses import asdict, dataclass

import torch

from gpuscore_kernels.launch import INTERPRETER, next_power_of_two


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One launch configuration; it does not depend on the number of rows, so neither do bits."""

    BLOCK_M: int  # rows of one expert
    BLOCK_N: int  # columns of a product
    BLOCK_K: int  # elements of a dot product at a time
    num_warps: int
    num_stages: int

    def constants(self, columns: int, width: int, experts: int) -> dict[str, object]:
        """Return the compile-time arguments of a product that is [places, columns], of rows of
        `width` elements."""
        sizes = {name: value for name, value in asdict(self).items() if name.isupper()}
        return sizes | {
            "EXPERTS": experts,
            "BLOCK": next_power_of_two(experts),
            "EVEN_N": columns % self.BLOCK_N == 0,
            "EVEN_K": width % self.BLOCK_K == 0,
        }


def config_for(arch: int, dtype: torch.dtype) -> ProductTiles:
    """Return the configuration. 64 rows are the fewest that wgmma multiplies; a batch of 1,000
    tokens gives each expert of Qwen3-30B-A3B as many on average, and rows that are missing in a
    tile cost as much as others. Three stages take 48 KiB of shared memory, on sm_90 72, so that two
    and three blocks fit on a multiprocessor and a product runs while the next tiles are copied."""
    if arch == INTERPRETER:
        return ProductTiles(16, 32, 16, num_warps=4, num_stages=1)
    if dtype == torch.float32:  # no tensor cores, so accumulators and operands are in registers
        return ProductTiles(64, 64, 32, num_warps=8, num_stages=2)
    return ProductTiles(64, 128, 64, num_warps=4, num_stages=3)


def most_tiles(places: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` rows that any division of the places among experts has."""
    full = min(experts, places)  # experts that have a place, and so at least one tile
    return full + (places - full) // rows
