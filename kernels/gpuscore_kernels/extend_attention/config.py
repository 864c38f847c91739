"""Launch configurations of the Triton kernel: one per kind of GPU, head size and dtype.

The table is fixed and nothing is tuned while serving, so scores and speed are the same at every
start. The entries of compute capability 9.0 were timed. The others compile without spilling
registers, and no such card has run them yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import torch

from gpuscore_kernels.extend_attention.table import TileShape


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of the kernel's tiles, and how it is launched."""

    block_m: int  # rows of a query tile: tokens x query heads per KV head; a power of two, >= 16
    block_n: int  # keys of a full tile; a power of two, >= 16
    masked_n: int  # keys of a masked tile; a power of two, >= 16, that divides `block_n`
    num_warps: int
    num_stages: int
    is_steady: bool = False  # a row's tiles do not depend on other rows

    def shape(self, group: int) -> TileShape:
        """Return the tile shape for `group` query heads per KV head.

        Raises:
            ValueError: `group` is larger than `block_m`.
        """
        if group > self.block_m:
            raise ValueError(
                f"{group} query heads share a KV head; supported: at most {self.block_m}"
            )
        return TileShape(self.block_m // group, self.block_n, self.masked_n, self.is_steady)

    def steady(self) -> "TileConfig":
        """Return the configuration with tiles of a row that do not depend on other rows."""
        return replace(self, masked_n=self.block_n, is_steady=True)


MAX_HEAD_DIM = 256
Row: TypeAlias = Mapping[int, TileConfig]  # by head size, rounded up
# L4, L40S, RTX PRO 6000 have 99 KiB of shared memory. Of the configurations with at least 32 keys
# per tile, these keep the most warps on a multiprocessor (docs/explanation/cuda-runner.md).
_SMALL = {
    64: TileConfig(64, 32, 16, num_warps=4, num_stages=3),
    128: TileConfig(128, 32, 32, num_warps=8, num_stages=3),
    256: TileConfig(64, 32, 32, num_warps=8, num_stages=2),
}
_HALVES = {
    80: {  # A100
        64: TileConfig(128, 64, 32, num_warps=8, num_stages=3),
        128: TileConfig(128, 32, 32, num_warps=8, num_stages=3),
        256: TileConfig(64, 32, 32, num_warps=8, num_stages=3),
    },
    89: _SMALL,
    # H100, H200: timed on an H100 (bench/LOG.md). A multiprocessor holds two tiles of 64
    # rows: one computes exponentials while the other multiplies.
    90: {
        64: TileConfig(64, 64, 64, num_warps=4, num_stages=3),
        128: TileConfig(64, 64, 64, num_warps=4, num_stages=3),
        256: TileConfig(128, 64, 32, num_warps=8, num_stages=2),
    },
    120: _SMALL,
}
# Tensor cores do not compute exact float32, so its tiles are small; float32 is for comparison only.
_SINGLES = {
    64: TileConfig(64, 32, 32, num_warps=8, num_stages=1),
    128: TileConfig(32, 32, 32, num_warps=8, num_stages=1),
    256: TileConfig(32, 16, 16, num_warps=8, num_stages=1),
}
_INTERPRETED = TileConfig(64, 16, 16, num_warps=1, num_stages=1)  # fits the KV pages of a CPU


# Rows by (compute capability times ten, bytes of an element), then by head size rounded up.
CONFIGS: Mapping[tuple[int, int], Row] = MappingProxyType(
    {(arch, 2): row for arch, row in _HALVES.items()} | {(arch, 4): _SINGLES for arch in _HALVES}
)


def config_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Return the configuration for a device; an unknown GPU gets the next older GPU's.

    Raises:
        ValueError: there is no configuration.
    """
    if device.type != "cuda":
        return _INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return config_of(10 * major + minor, head_dim, dtype.itemsize)


def config_of(arch: int, head_dim: int, itemsize: int) -> TileConfig:
    """Return the configuration for a compute capability times ten and bytes of an element."""
    known = [a for a, size in CONFIGS if a <= arch and size == itemsize]
    if not known:
        raise ValueError(f"compute capability is {arch / 10}; supported: 8.0 and newer")
    row = CONFIGS[max(known), itemsize]
    fitting = [size for size in row if size >= head_dim]
    if not fitting:
        raise ValueError(f"head_dim is {head_dim}; supported: at most {MAX_HEAD_DIM}")
    return row[min(fitting)]
