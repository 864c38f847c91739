"""Triton kernels for the decoder's row-wise functions and linear layers, and the choice of them
(`--kernels`).

The decoder itself calls the kernel for the heads of a QKV product. All other matrix products, and
functions that are not listed here, stay with torch.
"""

import importlib.util
import logging
import os
from typing import cast

import torch

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.compiler import Function, FunctionT
from gpuscore.errors import ConfigError
from gpuscore_kernels import hopper
from gpuscore_kernels.delta_net.reference import convolve, delta_rule, gated_norm, keep_tails
from gpuscore_kernels.reference import add_and_norm, gated, rms_norm

logger = logging.getLogger(__name__)

OLDEST = 8  # major compute capability


def use_kernels(setting: str, device: torch.device, dtype: torch.dtype) -> bool:
    """True if Triton's kernels are to run; raises ConfigError if the setting is not possible."""
    if setting == "torch" or (setting == "auto" and device.type == "cpu"):
        return False
    reason = why_no_triton(device, dtype)
    if reason is None:
        return True
    if setting == "triton":
        raise ConfigError(f"--kernels triton: {reason}")
    logger.warning("--kernels is torch, which is slow on %s: %s", device.type, reason)
    return False


def why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why no kernel of Triton's can run; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed here; pip install triton"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        older = f"compute capability is {major}.{minor}; supported: 8.0 and newer"
        return older if major < OLDEST else None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "device is cpu; supported: cuda (and Triton's interpreter, for tests)"
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly; supported: float16, float32"
    return None


def why_not_gated_product(model: DecoderConfig, attention: str, dtype: torch.dtype) -> str | None:
    """Say why gate-up products do not write silu(gate) * up themselves; None if they do."""
    if attention != "fa4":
        return f"--attention is {attention}, not fa4"
    aligned = model.hidden_size % 8 == model.intermediate_size % 8 == 0
    plain = model.mixture is None and not model.mlp_bias
    if dtype != torch.bfloat16 or model.activation != "silu" or not (plain and aligned):
        return "supported are SwiGLU in bfloat16, without a bias, with multiples of 8 columns"
    return hopper.why_not("product")


def in_triton(function: FunctionT, /) -> FunctionT:
    """Return the kernel that computes the same as `function`, or `function` if there is none.

    This is a `Compiler`, like the one that `rows_in_c.in_c` returns for a CPU.
    """
    from gpuscore_kernels.add_rms_norm import triton as norms  # need Triton
    from gpuscore_kernels.delta_net import triton as linear
    from gpuscore_kernels.gated import triton as gates

    kernels: dict[Function, Function] = {
        rms_norm: lambda x, weight, *how: norms.add_rms_norm(x, None, weight, *how)[1],
        add_and_norm: norms.add_rms_norm,
        gated: gates.gated,
        convolve: linear.convolve,
        keep_tails: linear.keep_tails,
        delta_rule: linear.delta_rule,
        gated_norm: linear.gated_norm,
    }
    return cast(FunctionT, kernels.get(function, function))
