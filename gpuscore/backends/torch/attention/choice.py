"""The attention backends and the choice among them (`--attention`).

All compute the mask rule (`types.batch.visible_rows`); they differ in the kernels they run.
"""

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.tiled import TorchAttention
from gpuscore.backends.torch.compiler import Function
from gpuscore.backends.torch.kernels import why_no_triton
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.errors import ConfigError
from gpuscore.types.batch import PackedBatch
from gpuscore_kernels import hopper
from gpuscore_kernels.extend_attention.config import config_for

FLASHINFER_HEADS = (64, 128, 256)
FA4_HEADS = (64, 128)
FA4_GROUPS = (1, 2, 4, 8)  # with these, its kernel keeps everything in registers

logger = logging.getLogger(__name__)


class AttentionPass(Protocol):
    """Attention of one batch."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [M, H, D], k and v [T, Hkv, D] -> [M, H, D].

        M is T, except in the last layer, where q holds the scored rows only.
        """


class AttentionBackend(Protocol):
    """One way to compute attention over one KV pool."""

    def prepare(self, batch: PackedBatch) -> AttentionPass:
        """Prepare, once for all layers, everything that depends on the batch's lengths."""


# Makes an `AttentionBackend`, or a backend for `GraphLauncher`, which asks it for tables.
Factory: TypeAlias = Callable[[DecoderConfig, KVPool], Any]


def choose_attention(
    setting: str,
    model: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
) -> str:
    """Return the attention backend's name; raise ConfigError if the one that is set cannot run."""
    if setting == "auto":
        if device.type == "cpu":
            return "torch"
        reason = _why_not_triton(model, device, dtype)
        if reason is None:
            return "triton"
        logger.warning("--attention is torch, which is slow on %s: %s", device.type, reason)
        return "torch"
    if setting not in REASONS:
        raise ConfigError(f"--attention {setting} needs --backend jax")
    reason = REASONS[setting](model, device, dtype)
    if deterministic and setting not in ("torch", "triton"):
        reason = "not supported with --deterministic: the shapes of its calls depend on the batch"
    if reason is not None:
        raise ConfigError(f"--attention {setting}: {reason}")
    return setting


def attention_factory(name: str, attend: Function, steady: bool) -> Factory:
    """Return a function that makes the named backend; imports no other backend's packages.

    Args:
        name: one of `NAMES`.
        attend: `extend_attention`'s reference, or its C version.
        steady: a row's bits must not depend on other rows.
    """
    if name == "triton":
        from gpuscore.backends.torch.attention.tiled import TritonAttention

        return lambda config, pool: TritonAttention(config, pool, steady=steady)
    if name == "flashinfer":
        from gpuscore.backends.torch.attention import flashinfer

        return flashinfer.FlashInferAttention
    if name == "fa4":
        from gpuscore.backends.torch.attention.fa4 import HopperAttention

        return HopperAttention
    return lambda config, pool: TorchAttention(config, pool, attend, steady)


def _why_not_triton(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    if (reason := why_no_triton(device, dtype)) is not None:
        return reason
    try:
        config_for(device, model.head_dim, dtype).shape(model.num_heads // model.num_kv_heads)
    except ValueError as error:
        return str(error)
    return None


def _why_not_flashinfer(
    model: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed here; pip install flashinfer-python"
    if device.type == "cpu":
        return "device is cpu; supported: cuda"
    if dtype == torch.float32:
        return "its kernels do not support float32; supported: bfloat16, float16"
    if any(model.windows) or model.attention_softcap is not None:
        return "not supported for models with sliding windows or soft-caps"
    if model.head_dim not in FLASHINFER_HEADS:
        return f"head_dim is {model.head_dim}; supported: 64, 128, 256"
    return None


def _why_not_fa4(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    if (reason := _why_not_triton(model, device, dtype)) is not None:
        return reason
    if device.type == "cpu" or torch.cuda.get_device_capability(device) != (9, 0):
        return "its kernel is for GPUs of compute capability 9.0 (H100, H200)"
    if dtype != torch.bfloat16:
        return f"dtype is {str(dtype).removeprefix('torch.')}; supported: bfloat16"
    if any(model.windows) or model.attention_softcap is not None:
        return "not supported for models with sliding windows or soft-caps"
    group = model.num_heads // model.num_kv_heads
    if model.head_dim not in FA4_HEADS or group not in FA4_GROUPS:
        return (
            f"head_dim is {model.head_dim}, and {group} heads share a KV head; supported: head_dim "
            f"{', '.join(map(str, FA4_HEADS))}, and {', '.join(map(str, FA4_GROUPS))} heads"
        )
    return hopper.why_not("attention", model.head_dim, group)


# For each backend, a function that says why it cannot run; None if it can.
REASONS = {
    "torch": lambda model, device, dtype: None,
    "triton": _why_not_triton,
    "flashinfer": _why_not_flashinfer,
    "fa4": _why_not_fa4,
}
NAMES = tuple(REASONS)
