"""Finds out whether a device computes linear layers in eight bits."""

import torch

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.quantization import LINEAR, EightBits
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.backends.torch.linear import exact_on_this_cpu
from gpuscore_kernels.quantized import fp8


def why_not_in_eight_bits(
    model: DecoderConfig, device: torch.device, dtype: torch.dtype, kernels: bool, kind: EightBits
) -> str | None:
    """Say why linear layers are not computed in a format here; None if they are.

    Args:
        model: its configuration.
        device, dtype: of the model.
        kernels: Triton's kernels run.
        kind: the format.
    """
    if model.mixture is not None and (device.type != "cpu" or kernels):
        return "mixtures of experts are computed in eight bits on CPUs only, with --kernels torch"
    if device.type == "cuda" and not kernels:
        return "products in eight bits on CUDA need --kernels triton"
    if kind == "fp8":
        return _why_not_fp8(model, device, dtype)
    if device.type == "cpu" and not exact_on_this_cpu():
        return "this CPU has neither VNNI nor AMX, without which sums of INT8 overflow"
    return None


def _why_not_fp8(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"device {device.type} does not compute FP8"
    capability, shapes = torch.cuda.get_device_capability(device), weight_shapes(model)
    for part in sorted(LINEAR):
        outputs, width = shapes[part]
        reason = fp8.refusal(capability, outputs, width, dtype, blocks=False)
        if reason is not None:
            return reason
    return None
