"""Launch configurations of the fused products."""

from dataclasses import dataclass, replace

import torch

from gpuscore_kernels.launch import INTERPRETER, LaunchConfig


@dataclass(frozen=True, slots=True)
class FusedConfig(LaunchConfig):
    """Tiles of the kernels; see `LaunchConfig`."""

    BLOCK_M: int  # rows
    BLOCK_K: int  # elements of a row at a time


GATED_COLUMNS = 64  # of the gate, and as many of the up projection, in a block


def config_for(arch: int, dtype: torch.dtype) -> FusedConfig:
    """Return the configuration: blocks of few rows, so that a small batch fills the device.

    Chosen by shared memory: four stages of 64 columns take 96 KiB, so that an H100 holds two blocks
    per multiprocessor; other architectures have 99 KiB for a block. None was timed on a GPU yet.
    """
    if arch == INTERPRETER:
        return FusedConfig(16, 16, num_warps=4, num_stages=1)
    if dtype == torch.float32:  # no tensor cores, so accumulators and operands are in registers
        return FusedConfig(32, 32, num_warps=4, num_stages=2)
    return FusedConfig(64, 64, num_warps=4, num_stages=4 if arch == 90 else 3)


def config_of_heads(arch: int, dtype: torch.dtype, half: int) -> FusedConfig:
    """Return the configuration for `half` columns, half a head, twice in a block.

    Norm and rotation need registers beside the sums, so a wide head has more warps, and the widest
    shorter tiles, for shared memory.
    """
    config = config_for(arch, dtype)
    if half > 64:
        config = replace(config, BLOCK_K=config.BLOCK_K // 2)
    return replace(config, num_warps=8) if half >= 64 else config
