"""Decides device, dtype, sizes and kernels of the torch backend, before any weight is read."""

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from gpuscore.backends.common.architectures import Architecture, read_architecture
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.plan import (
    MAX_BATCH_TOKENS,
    PagePlan,
    check_weights,
    plan_rank,
)
from gpuscore.backends.common.quantization import Precision
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.shapes import count_parameters
from gpuscore.backends.common.shards import ALL, Shard, check_tensor_parallel
from gpuscore.backends.torch.attention.choice import choose_attention
from gpuscore.backends.torch.compiler import use_compiler
from gpuscore.backends.torch.devices import (
    check_devices,
    choose_device,
    computes_natively,
    memory_of,
)
from gpuscore.backends.torch.kernels import use_kernels, why_not_gated_product
from gpuscore.backends.torch.layers import STEADY_ROWS, steady_threads
from gpuscore.backends.torch.linear import why_not_int8
from gpuscore.backends.torch.mixture import why_not_grouped
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types.batch import BackendLimits

logger = logging.getLogger(__name__)

# Tokens of the largest batch that runs as a CUDA graph. A larger batch keeps the GPU busy for
# longer than its launches take, so a graph would save nothing and cost padding. A CPU has none.
GRAPH_TOKENS = {"cpu": 0, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The checked settings of a `TorchBackend`, from the options and the model's config.json."""

    directory: str
    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    max_tokens: int  # the most tokens of one batch
    max_model_len: int
    pages: PagePlan
    weight_bytes: int
    threads: int | None
    compile: bool
    kernels: bool  # use Triton kernels for row-wise functions and label heads
    deterministic: bool
    attention: str  # one of attention.choice.NAMES
    graph_tokens: int | None  # tokens of the largest CUDA graph; None = no `GraphLauncher`
    identity: str  # see BackendLimits
    # Why the gate-up product does not compute silu(gate) * up itself; None = it does.
    not_gated: str | None = None
    precision: Precision = "full"  # of the linear layers' weights
    framework: Literal["torch"] = "torch"
    shard: Shard = ALL  # the part of the model that this process holds
    settings: ModelConfig = field(default_factory=ModelConfig)  # what the user chose

    @property
    def shard_config(self) -> DecoderConfig:
        """The configuration of this process's shard."""
        return self.shard.part_of(self.architecture.config)

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def free_memory(self) -> int:
        """Return the bytes that weights, batches and pages may take now."""
        return memory_of(self.device, self.shard.ranks).free()

    def limits(self, num_pages: int) -> BackendLimits:
        """Return the backend's limits; `num_pages` is known once the weights are loaded."""
        return BackendLimits(
            max_tokens=self.max_tokens,
            page_size=self.pages.size,
            num_pages=num_pages,
            max_model_len=self.max_model_len,
            vocab_rows=self.architecture.config.vocab_size,
            identity=self.identity,
            deterministic_chunk=STEADY_ROWS if self.deterministic else 0,
            classes=self.architecture.config.classes,
            quantized=self.precision != "full",
            num_states=self.pages.num_states,
            gated_product="yes" if self.not_gated is None else f"no: {self.not_gated}",
        )


def plan_backend(directory: Path, config: ModelConfig, rank: int = 0) -> TorchPlan:
    """Make the plan for one rank; raise ConfigError for an unsupported model or setting."""
    check_tensor_parallel(config)
    architecture = read_architecture(RawConfig.read(directory))
    shard = Shard(rank, config.tensor_parallel)
    device = choose_device(config.device)
    if rank == 0:  # any other rank sees only its own device
        check_devices(shard.ranks, device)
    plan = plan_rank(
        architecture,
        config,
        device.type,
        shard=shard,
        computes=computes_natively,
        why_not_int8=partial(why_not_int8, device),
        recomputed=STEADY_ROWS if config.deterministic else 0,
    )
    part = plan.part
    dtype: torch.dtype = getattr(torch, plan.dtype)
    kernels = use_kernels(config.kernels, device, dtype)
    check_weights(plan.pages, memory_of(device, shard.ranks).free(), plan.weight_bytes)
    attention = choose_attention(
        config.attention, part, device, dtype, deterministic=config.deterministic
    )
    return TorchPlan(
        directory=str(directory),
        architecture=architecture,
        device=device,
        dtype=dtype,
        max_tokens=_max_tokens(config, device),
        max_model_len=plan.max_model_len,
        pages=plan.pages,
        weight_bytes=plan.weight_bytes,
        threads=_threads(architecture.config, config, device),
        compile=use_compiler(config.compile, device, dtype, count_parameters(part)),
        kernels=kernels,
        deterministic=config.deterministic,
        attention=attention,
        graph_tokens=_graph_tokens(
            config,
            device,
            _why_no_graphs(config, attention, kernels) or why_not_grouped(part, device, dtype),
        ),
        identity=f"{directory} {config.revision} {dtype} {plan.precision}",
        not_gated=why_not_gated_product(part, attention, dtype),
        precision=plan.precision,
        shard=shard,
        settings=config,
    )


def _threads(model: DecoderConfig, config: ModelConfig, device: torch.device) -> int | None:
    if config.tensor_parallel > 1 and device.type == "cpu":  # the ranks share the cores
        return max(1, (config.threads or torch.get_num_threads()) // config.tensor_parallel)
    if not config.deterministic or device.type != "cpu":
        return config.threads
    threads = config.threads or torch.get_num_threads()
    steady = steady_threads(model, threads)
    if config.threads is not None and steady < threads:
        raise ConfigError(
            f"--threads {threads} cannot divide this model's work evenly, which --deterministic "
            f"needs; the next lower number that can is {steady}"
        )
    return steady


def _max_tokens(config: ModelConfig, device: torch.device) -> int:
    limit = config.max_batch_tokens or MAX_BATCH_TOKENS[device.type]
    if config.deterministic and limit < STEADY_ROWS:
        raise ConfigError(
            f"--max-batch-tokens {limit} is too low: --deterministic needs {STEADY_ROWS}"
        )
    return limit


def _why_no_graphs(config: ModelConfig, attention: str, kernels: bool) -> str | None:
    if attention == "fa4" and not kernels:
        raise ConfigError("--attention fa4 needs --kernels triton, which gather its keys")
    if attention not in ("triton", "fa4") or not kernels:
        chosen = f"--attention is {attention}, --kernels {'triton' if kernels else 'torch'}"
        return f"{chosen}; both have to be triton"
    if config.deterministic:
        return "not supported with --deterministic, as its number of tiles depends on the batch"
    return None


def _graph_tokens(config: ModelConfig, device: torch.device, reason: str | None) -> int | None:
    tokens = config.cuda_graph_tokens
    if config.tensor_parallel > 1:
        return None
    if reason is None:
        most = GRAPH_TOKENS[device.type] if tokens is None else tokens
        return min(most, _max_tokens(config, device))
    if tokens:
        raise ConfigError(f"--cuda-graph-tokens {tokens}: {reason}")
    return None
