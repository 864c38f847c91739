"""The architectures that Triton kernels are launched for."""

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
