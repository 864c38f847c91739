"""`JaxPlan`: device, dtype and sizes, decided before any weight is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from gpuscore.backends.common.architectures import Architecture, read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.common.plan import (
    ITEM_SIZE,
    MAX_BATCH_TOKENS,
    check_weights,
    choose_dtype,
    choose_max_model_len,
    plan_pages,
)
from gpuscore.backends.common.quantization import EightBits, Precision, choose_precision
from gpuscore.backends.common.shapes import count_weight_bytes
from gpuscore.backends.common.shards import refuse_with_ranks
from gpuscore.backends.common.sizing import PagePlan
from gpuscore.backends.jax.layout import ProgramSizes, TileSizes, buckets
from gpuscore.backends.jax.platform import find_device, free_memory, kind_of
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.limits import BackendLimits

ARCHITECTURES = tuple(
    f"{architecture}For{head}"
    for head in ("CausalLM", "SequenceClassification")
    for architecture in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
# A CPU's tiles fit its caches; on other devices one tile has to keep the device busy. The numbers
# for other devices were not measured on hardware.
ROWS = {"cpu": 128, "cuda": 512, "tpu": 512}
OWN_KEYS = {"cpu": 64, "cuda": 512, "tpu": 512}
PREFIX_KEYS = {"cpu": 512, "cuda": 2048, "tpu": 2048}
# A batch whose prefixes have more pages than this (or four full prompts, or four for each row) runs
# in the largest program, whose page lists hold any batch.
PAGES, PROMPTS, PER_ROW = 65536, 4, 4


@dataclass(frozen=True, slots=True)
class JaxPlan:
    """Everything `JaxBackend` needs, checked; making one reads config.json and nothing else."""

    directory: str
    architecture: Architecture
    device: jax.Device
    dtype_name: str
    max_tokens: int  # of one batch
    max_model_len: int
    pages: PagePlan
    weight_bytes: int
    attention: str  # xla or pallas
    compile_cache: str | None  # directory of compiled programs
    identity: str  # see BackendLimits
    precision: Precision = "full"  # of linear layers
    framework: Literal["jax"] = "jax"

    @property
    def device_name(self) -> str:
        return kind_of(self.device)

    def free_memory(self) -> int:
        """Bytes that weights, batches and pages may take now."""
        return free_memory(self.device)

    def sizes(self) -> tuple[ProgramSizes, ...]:
        """Sizes of all programs, in ascending order; the last one holds any batch."""
        kind, longest = self.device_name, -(-self.max_model_len // self.pages.size)
        found = []
        for tokens in buckets(self.max_tokens, ROWS[kind]):
            rows = min(ROWS[kind], tokens)
            tiling = TileSizes(
                rows, min(OWN_KEYS[kind], rows), PREFIX_KEYS[kind] // self.pages.size
            )
            usual = min(tokens * longest, max(PAGES, PROMPTS * longest, PER_ROW * tokens))
            found.append(ProgramSizes(tokens, usual, tiling))
        largest = found[-1]
        any_batch = ProgramSizes(largest.tokens, largest.tokens * longest, largest.tiling)
        return (*found, any_batch) if any_batch != largest else tuple(found)

    def limits(self, num_pages: int) -> BackendLimits:
        """Limits of the backend; the number of pages is known once the weights are loaded."""
        return BackendLimits(
            max_tokens=self.max_tokens,
            page_size=self.pages.size,
            num_pages=num_pages,
            max_model_len=self.max_model_len,
            vocab_rows=self.architecture.config.vocab_size,
            token_buckets=tuple(sorted({sizes.tokens for sizes in self.sizes()})),
            identity=self.identity,
            classes=self.architecture.config.classes,
            quantized=self.precision != "full",
        )


def plan_backend(directory: Path, config: ModelConfig) -> JaxPlan:
    """Decide what to load; raises ConfigError for a model or setting that is not supported."""
    refuse_with_ranks(config)
    _refuse_options(config)
    architecture = read_architecture(RawConfig.read(directory))
    if architecture.config.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: architectures is {architecture.config.architecture!r}, which "
            f"--backend jax does not compute; supported there: {', '.join(ARCHITECTURES)}; the "
            "others need --backend torch"
        )
    device = find_device(config.device)
    kind = kind_of(device)
    # On a CPU, XLA computes products of other dtypes by converting them to float32 and back.
    dtype = choose_dtype(architecture.config, config.dtype, kind, lambda name: name == "float32")
    max_len = choose_max_model_len(architecture.config, config.max_model_len)
    precision = choose_precision(config.quantization, architecture.storage, _no_eight_bits)
    weight_bytes = count_weight_bytes(architecture.config, ITEM_SIZE[dtype], precision)
    pages = plan_pages(architecture.config, config, max_len, dtype, kind, 0, weight_bytes)
    check_weights(pages, free_memory(device), weight_bytes, config.memory_limit)
    return JaxPlan(
        directory=str(directory),
        architecture=architecture,
        device=device,
        dtype_name=dtype,
        max_tokens=config.max_batch_tokens or MAX_BATCH_TOKENS[kind],
        max_model_len=max_len,
        pages=pages,
        weight_bytes=weight_bytes,
        attention=_attention(config.attention, kind),
        compile_cache=config.compile_cache,
        identity=f"{directory} {config.revision} jax {dtype} {precision}",
        precision=precision,
    )


def _no_eight_bits(kind: EightBits) -> str | None:
    return None if kind == "int8" else "--backend jax does not compute FP8"


def _attention(wanted: str, kind: str) -> str:
    if wanted == "pallas" and kind != "tpu":
        raise ConfigError(f"--attention pallas: device is {kind}; supported: tpu")
    return "pallas" if wanted == "pallas" else "xla"


# Option -> the values that --backend jax accepts, and the reason why it accepts no others.
_TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "attention": (("auto", "pallas"), "needs --backend torch"),
    "kernels": (("auto",), "needs --backend torch; XLA makes its own kernels"),
    "compile": (("auto", "on"), "needs --backend torch; XLA always compiles"),
    "cuda_graph_tokens": ((None, 0), "needs --backend torch; XLA decides about CUDA graphs"),
    "deterministic": (
        (False,),
        "needs calls of fixed shapes for each row, which --backend jax does not have: its "
        "batches are padded to buckets",
    ),
    "threads": (
        (None,),
        "needs --backend torch; JAX takes as many as the process has CPUs (see taskset)",
    ),
}


def _refuse_options(config: ModelConfig) -> None:
    """Raise ConfigError for an option that only torch's backend has."""
    for name, (allowed, reason) in _TAKEN.items():
        value = getattr(config, name)
        if value not in allowed:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {reason}" if value is True else f"{flag} {value} {reason}")
