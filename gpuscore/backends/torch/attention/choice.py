"""The attention backends and the choice among them (`--attention`).

All compute the mask rule, which is `gpuscore.batch.visible_rows`; they differ in whose kernels run.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.layout import Tiling
from gpuscore.backends.torch.attention.operators import Merge, TorchAttention
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.batch import PackedBatch
from gpuscore.errors import ConfigError
from gpuscore_kernels.extend_attention.config import MAX_HEAD_DIM, config_for
from gpuscore_kernels.partial_attention.api import Implementation

FLASHINFER_HEADS = (64, 128, 256)

logger = logging.getLogger(__name__)


class AttentionPass(Protocol):
    """Attention of one batch."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [M, H, D], k and v [T, Hkv, D] -> [M, H, D].

        M is T, except in the last layer, where q holds the scored rows only.
        """


class AttentionBackend(Protocol):
    """One way to compute attention, over one pool."""

    def prepare(self, batch: PackedBatch) -> AttentionPass:
        """What depends on a batch's lengths, once for all layers."""


Factory: TypeAlias = Callable[[DecoderConfig, KVPool], AttentionBackend]


def choose_attention(
    wanted: str,
    model: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
) -> str:
    """The backend's name; raises ConfigError if it was asked for and cannot run."""
    if wanted == "auto":
        # Its bits were compared on CPUs; those of Triton's kernel on no GPU yet.
        if device.type == "cpu" or deterministic:
            return "torch"
        reason = _why_not_triton(model, device, dtype)
        if reason is None:
            return "triton"
        logger.warning("--attention is torch, which is slow on %s: %s", device.type, reason)
        return "torch"
    if wanted not in _REASONS:
        raise ConfigError(f"--attention {wanted} is of --backend jax")
    reason = _REASONS[wanted](model, device, dtype)
    if deterministic and wanted not in ("torch", "triton"):
        reason = "its calls have shapes that depend on the batch, so not with --deterministic"
    if reason is not None:
        raise ConfigError(f"--attention {wanted}: {reason}")
    return wanted


def attention_factory(
    name: str,
    model: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    merge: Merge,
    tiling: Tiling | None,
) -> Factory:
    """Makes the backend of that name; what it needs is imported here."""
    if name == "triton":
        from gpuscore.backends.torch.attention.triton import TritonAttention

        return lambda config, pool: TritonAttention(config, pool, steady=tiling is not None)
    if name == "two-pass":
        from gpuscore.backends.torch.attention.two_pass import TwoPassAttention, choose_dense

        dense = choose_dense(model, device, dtype)
        return lambda config, pool: TwoPassAttention(config, pool, dense)
    if name.startswith("flashinfer"):
        from gpuscore.backends.torch.attention.flashinfer import FlashInfer, FlashInferAttention

        library = FlashInfer(device, cascade=name == "flashinfer-cascade")
        return lambda config, pool: FlashInferAttention(config, pool, library)
    impl: Implementation = "cpu" if device.type == "cpu" else "reference"
    return lambda config, pool: TorchAttention(config, pool, impl, merge, tiling)


def _why_not_torch(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def _why_not_triton(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed here; pip install triton"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "device is cpu; supported: cuda (and Triton's interpreter, for tests)"
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly; supported: float16, float32"
    if model.head_dim > MAX_HEAD_DIM:
        return f"heads have {model.head_dim} numbers; supported: {MAX_HEAD_DIM}"
    try:
        config_for(device, model.head_dim, dtype).shape(model.num_heads // model.num_kv_heads)
    except ValueError as error:
        return str(error)
    return None


def _why_not_two_pass(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu":
        return None
    if any(model.windows) or model.attention_softcap is not None:
        return "the library's kernels know neither sliding windows nor soft-caps with a prefix"
    if dtype == torch.float32:
        return "the library's kernels know no float32; supported: bfloat16, float16"
    return _why_not_triton(model, device, dtype)


def _why_not_flashinfer(
    model: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed here; pip install flashinfer-python"
    if device.type == "cpu":
        return "device is cpu; supported: cuda"
    if dtype == torch.float32:
        return "its kernels know no float32; supported: bfloat16, float16"
    if any(model.windows) or model.attention_softcap is not None:
        return "it is not used here for models with sliding windows or soft-caps"
    if model.head_dim not in FLASHINFER_HEADS:
        return f"heads have {model.head_dim} numbers; supported: 64, 128, 256"
    return None


_REASONS = {
    "torch": _why_not_torch,
    "triton": _why_not_triton,
    "two-pass": _why_not_two_pass,
    "flashinfer": _why_not_flashinfer,
    "flashinfer-cascade": _why_not_flashinfer,
}
NAMES = tuple(_REASONS)
