"""Choices for every launch of a Triton kernel: architecture, size of blocks, number of warps."""

import torch
from torch import Tensor

ARCHES = (80, 89, 90, 120)  # compute capabilities times ten that kernels are shipped for
INTERPRETER = 0  # instead of an architecture, for tensors on a CPU with TRITON_INTERPRET=1


def arch_of(tensor: Tensor) -> int:
    """Return the newest architecture with shipped kernels that is not newer than the device.

    Raises:
        ValueError: the device is older than all these architectures.
    """
    if tensor.device.type == "cpu":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(tensor.device)
    older = [arch for arch in ARCHES if arch <= major * 10 + minor]
    if not older:
        raise ValueError(f"sm_{major}{minor} is older than sm_{ARCHES[0]}, the oldest supported")
    return older[-1]


def next_power_of_two(number: int) -> int:
    """Smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def row_warps(block: int) -> int:
    """Warps of a program that holds `block` elements, 8 to 64 elements per thread."""
    return min(16, max(1, block // 256))
