"""Estimates the memory of a model on a CUDA device, which need not be here, by config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuscore.backends.common.architectures import Architecture, read_architecture
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.plan import (
    ITEM_SIZE,
    MAX_BATCH_TOKENS,
    PagePlan,
    check_weights,
    plan_rank,
)
from gpuscore.backends.common.quantization import ON_CPUS, Precision
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.shards import Shard, check_tensor_parallel
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

CONTEXT = 2**29  # bytes that CUDA and its libraries take of a device's memory; not measured
# The largest batch takes FIXED bytes and some times the bytes of a layer's widest point. Fitted
# to what Qwen3-0.6B, Llama-3.1-8B and Qwen3-30B-A3B take in batches of 16,384 tokens on a simulated
# device: 0.86, 3.02 and 1.76 GB. No card has measured it yet.
FIXED = 200_000_000
DENSE = 1.38
OF_EXPERTS = 1.66
RESIDUAL = 8  # bytes of a number of the residual stream, float32 before and after a sum
ABOUT = 0.25  # share by which other models may differ; a guess


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The parts of a device's memory, in bytes.

    Args:
        architecture: the model's; the device may hold a rank's part of it.
        dtype: the dtype of weights, keys and values.
        precision: the precision of linear layers.
        max_tokens: the most tokens of one batch.
        pages: the rule for KV pages.
        free_bytes: the device's free memory.
        context: what CUDA itself takes.
        weight_bytes: what the weights take.
        batch_bytes: estimate for the largest batch.
    """

    architecture: Architecture
    dtype: str
    precision: Precision
    max_tokens: int
    pages: PagePlan
    free_bytes: int
    context: int
    weight_bytes: int
    batch_bytes: int

    @property
    def left(self) -> int:
        """Bytes beside the weights."""
        return max(0, self.free_bytes - self.context - self.weight_bytes)

    @property
    def num_pages(self) -> int:
        """KV pages that fit, which may be too few."""
        if self.pages.exact_bytes is not None:
            return self.pages.exact_bytes // self.pages.page_bytes
        rest = max(0, self.left - self.batch_bytes - self.pages.state_bytes)
        return int(rest * self.pages.fraction) // self.pages.page_bytes

    def check(self) -> None:
        """Raise ConfigError, with a setting that would fit, if the model does not fit."""
        try:
            check_weights(self.pages, self.free_bytes - self.context, self.weight_bytes)
            self.pages.count(self.left, self.batch_bytes)
        except ConfigError as error:
            fits = (self.num_pages - 1) * self.pages.size
            more = f"; --max-model-len {fits} would fit" if fits > 0 else ""
            raise ConfigError(f"{error}{more}") from error

    @property
    def resolved(self) -> Mapping[str, object]:
        """Values that settings come to on that device, by their names."""
        return {
            "device": "cuda",
            "dtype": self.dtype,
            "quantization": self.precision,
            "attention": "triton",
            "kernels": "triton",
            "compile": "off",
            "max_batch_tokens": self.max_tokens,
            "max_model_len": self.pages.max_model_len,
            "memory_fraction": self.pages.fraction,
        }


def plan_memory(directory: Path, config: ModelConfig, memory: int) -> MemoryPlan:
    """Plan for a CUDA device with so many bytes of free memory.

    Raises:
        ConfigError: the model or a setting is not supported. Whether it fits, `check` says.
    """
    if config.device not in ("auto", "cuda") or config.backend != "torch":
        raise ConfigError(
            f"--device-memory plans for --device cuda and --backend torch, not for "
            f"{config.device} and {config.backend}"
        )
    check_tensor_parallel(config)
    architecture = read_architecture(RawConfig.read(directory))
    plan = plan_rank(
        architecture,
        config,
        "cuda",
        shard=Shard(0, config.tensor_parallel),
        computes=lambda _: True,
        why_not_int8=lambda: ON_CPUS,
    )
    max_tokens = config.max_batch_tokens or MAX_BATCH_TOKENS["cuda"]
    return MemoryPlan(
        architecture=architecture,
        dtype=plan.dtype,
        precision=plan.precision,
        max_tokens=max_tokens,
        pages=plan.pages,
        free_bytes=memory,
        context=CONTEXT,
        weight_bytes=plan.weight_bytes,
        batch_bytes=estimate_batch(plan.part, max_tokens, ITEM_SIZE[plan.dtype]),
    )


def estimate_batch(config: DecoderConfig, tokens: int, item_size: int) -> int:
    """Return about the bytes that a forward pass of `tokens` rows takes.

    The widest point of a layer is the larger of an MLP (residual, its norm, gate and up, their
    product) and attention (residual, its norm, queries, keys, values and outputs). A linear layer
    has about eight tensors of its convolved columns; that is a guess.
    """
    inner = config.intermediate_size
    factor = DENSE
    if config.mixture is not None:
        inner = max(inner, config.mixture.intermediate_size * config.mixture.top_k)
        factor = OF_EXPERTS
    attention = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    linear = 0 if config.delta_net is None else 8 * config.delta_net.convolved
    widest = config.hidden_size + max(3 * inner, attention, linear)
    return FIXED + int(factor * tokens * (item_size * widest + RESIDUAL * config.hidden_size))
