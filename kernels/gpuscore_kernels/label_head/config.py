"""Launch configurations of the slices' kernel, by architecture and dtype."""

from dataclasses import dataclass

import torch

from gpuscore_kernels.launch import INTERPRETER, LaunchConfig


@dataclass(frozen=True, slots=True)
class Config(LaunchConfig):
    """Tiles of the kernel; see `LaunchConfig`."""

    BLOCK_M: int  # rows
    BLOCK_N: int  # tokens
    BLOCK_K: int  # elements of a row at a time
    SLICES: int  # slices of the vocabulary, one program each; a power of two


def config_for(arch: int, dtype: torch.dtype) -> Config:
    """Return the configuration. Three stages of bfloat16 take 64 KiB of shared memory, on sm_90 96,
    and every architecture has 99: a product runs while the next tiles are copied."""
    if arch == INTERPRETER:
        return Config(16, 32, 16, SLICES=4, num_warps=4, num_stages=1)
    # Without tensor cores accumulators and operands are in registers. With 8 warps two blocks would
    # share a multiprocessor at the 128 registers that this leaves a thread, and spill a few.
    if dtype == torch.float32:
        return Config(64, 64, 32, SLICES=128, num_warps=16, num_stages=2)
    return Config(128, 128, 64, SLICES=128, num_warps=8, num_stages=3)
