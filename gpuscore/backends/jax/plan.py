"""`JaxPlan`: device, dtype and sizes, decided before any weight is read."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from gpuscore.backends.common.architectures import Architecture, read_architecture
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.plan import (
    ITEM_SIZE,
    MAX_BATCH_TOKENS,
    PagePlan,
    check_weights,
    choose_dtype,
    choose_max_model_len,
    plan_pages,
)
from gpuscore.backends.common.quantization import Precision, choose_precision
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.shapes import count_weight_bytes
from gpuscore.backends.common.shards import check_tensor_parallel
from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.label_head import VOCAB_TILE
from gpuscore.backends.jax.layout import (
    LABELS_PER_TOKEN,
    ProgramSizes,
    TileSizes,
    buckets,
    page_entries,
)
from gpuscore.backends.jax.platform import find_device, free_memory, kind_of
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.models.files import PROCESS_REWARD, SEQUENCE, TOKENS
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import MAX_TOP

ARCHITECTURES = (
    *(
        f"{architecture}{head}"
        for head in ("ForCausalLM", SEQUENCE, TOKENS)
        for architecture in ("Llama", "Mistral", "Qwen2", "Qwen3")
    ),
    f"Qwen2{PROCESS_REWARD}",
)
# A CPU's tiles fit its caches; on other devices one tile has to keep the device busy. The numbers
# for other devices were not measured on hardware.
ROWS = {"cpu": 128, "cuda": 512, "tpu": 512}
BATCH_KEYS = {"cpu": 64, "cuda": 512, "tpu": 512}
PREFIX_KEYS = {"cpu": 512, "cuda": 2048, "tpu": 2048}
# Rows of matrix products: a TPU v6e reads weights in the time of 560 rows' products.
PRODUCT_ROWS = {"cpu": (128,), "cuda": (512,), "tpu": (2048, 512)}
KERNEL_ROWS = KERNEL_KEYS = 256  # of the Pallas kernel
# Columns of the tiles in which a device stores arrays; see `Heads`.
LANES = {"cpu": 1, "cuda": 1, "tpu": 128}
# Entries of a batch's page lists; a batch with more is divided, unless it has only one prompt. The
# kernel has memory for 262,144.
PAGES = 65536
MARGIN = 1.25  # factor of the estimate; programs of small models took 0.8 to 1.2 of the estimate
KEPT_BITS = 6  # a number of pages is rounded down to so many leading bits


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
    identity: str  # see BackendLimits
    precision: Precision = "full"  # of linear layers
    framework: Literal["jax"] = "jax"
    settings: ModelConfig = field(default_factory=ModelConfig)  # the plan was made from these

    @property
    def device_name(self) -> str:
        return kind_of(self.device)

    def free_memory(self) -> int:
        """Bytes that weights, batches and pages may take now."""
        return free_memory(self.device)

    @property
    def heads(self) -> Heads:
        """Heads, as their keys and values are stored."""
        return heads_of(self.architecture.config, self.device_name)

    def sizes(self) -> tuple[ProgramSizes, ...]:
        """Sizes of all programs, in ascending order."""
        kind = self.device_name
        return tuple(
            self.size(tokens) for tokens in buckets(self.max_tokens, PRODUCT_ROWS[kind][0])
        )

    def size(self, tokens: int) -> ProgramSizes:
        """Return the sizes of the program for a bucket."""
        kind = self.device_name
        kernel = self.attention == "pallas"
        rows, keys, prefix = (
            (KERNEL_ROWS, KERNEL_KEYS, min(KERNEL_KEYS, tokens))
            if kernel
            else (ROWS[kind], BATCH_KEYS[kind], PREFIX_KEYS[kind])
        )
        of_products = tuple(size for size in PRODUCT_ROWS[kind] if tokens % size == 0)
        tiling = TileSizes(
            rows=min(rows, tokens),
            batch_keys=min(keys, tokens),
            prefix_pages=prefix // self.pages.size,
            product_rows=of_products or (tokens,),
        )
        entries = int(page_entries(np.array([self.max_model_len]), tiling, self.pages.size)[0])
        return ProgramSizes(tokens, max(entries, min(tokens * entries, PAGES)), tiling)

    def count_pages(self, free: int, batch: int, *, estimated: bool = False) -> int:
        """Return the number of KV pages.

        A number that free memory determines is rounded, since it is part of every program, and
        JAX's cache has no program that was compiled for another number.

        Args:
            free: bytes beside the weights.
            batch: bytes that the largest program takes of `free`.
            estimated: `batch` is a guess, which refuses no model.

        Raises:
            ConfigError: too few pages fit.
        """
        pages = self.pages
        if estimated and pages.needed * pages.page_bytes > (free - batch) * pages.fraction:
            batch = 0
        count = pages.count(free, batch)
        if pages.exact_bytes is not None or count == pages.most:
            return count
        step = 1 << max(0, count.bit_length() - KEPT_BITS)
        return max(count // step * step, pages.needed)

    def estimated_bytes(self, sizes: ProgramSizes) -> int:
        """Estimate the bytes that a program takes beside weights and pool, rather too high."""
        config = self.architecture.config
        heads = self.heads
        tokens = sizes.tokens
        rows = sizes.tiling.product_rows[0]
        widest = 2 * config.intermediate_size + (config.num_heads + 2 * heads.kv) * heads.dim
        of_rows = config.hidden_size + heads.query * heads.span + 2 * heads.width
        item = ITEM_SIZE[self.dtype_name]
        results = 8 * MAX_TOP + 4 * LABELS_PER_TOKEN + 4
        in_tile = rows * 4 * (2 * widest + VOCAB_TILE)
        # The weights of a layer of the loop, and of the last one, may be copied.
        of_layers = 2 * config.hidden_size * (widest + config.intermediate_size) * item
        of_layers += 2 * config.hidden_size * config.num_heads * config.head_dim * item
        residual = 2 * 4 * config.hidden_size  # of all rows, and of scored ones
        of_tokens = tokens * (of_rows * item + residual + results + 4 * LANES["tpu"])
        return int(MARGIN * (of_tokens + in_tile + of_layers))

    def program_identity(self, sizes: ProgramSizes) -> str:
        """Return everything that the memory of a program depends on, as text."""
        parts = (self.architecture.config, sizes, self.dtype_name, self.precision, self.attention)
        return repr((*parts, self.device_name, self.device.device_kind, jax.__version__))

    def limits(self, num_pages: int) -> BackendLimits:
        """Limits of a backend with so many pages, a number known once the weights are loaded."""
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
    check_tensor_parallel(config)
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
    _refuse_float16(dtype, kind)
    precision = choose_precision(config.quantization, architecture.storage, lambda: None)
    weight_bytes = count_weight_bytes(architecture.config, ITEM_SIZE[dtype], precision)
    model = architecture.config
    pages = plan_pages(model, config, max_len=max_len, dtype=dtype, device=kind, recomputed=0)
    pages = replace(pages, page_bytes=pages.size * _token_bytes(architecture.config, dtype, kind))
    check_weights(pages, free_memory(device), weight_bytes)
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
        identity=f"{directory} {config.revision} jax {dtype} {precision}",
        precision=precision,
        settings=config,
    )


def heads_of(config: DecoderConfig, kind: str) -> Heads:
    """Return a model's heads, as they are stored on a device of that kind."""
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim, LANES[kind])


def _token_bytes(config: DecoderConfig, dtype: str, kind: str) -> int:
    """Bytes of one token's keys and values over all layers, with the padding of a device."""
    return 2 * config.num_layers * heads_of(config, kind).width * ITEM_SIZE[dtype]


def _refuse_float16(dtype: str, kind: str) -> None:
    if dtype == "float16" and kind == "tpu":
        raise ConfigError(
            "the dtype is float16, which a TPU multiplies as bfloat16; choose --dtype bfloat16 or "
            "--dtype float32"
        )


def _attention(requested: str, kind: str) -> str:
    if requested == "pallas" and kind != "tpu":
        raise ConfigError(f"--attention pallas: device is {kind}; supported: tpu")
    if requested == "auto":
        return "pallas" if kind == "tpu" else "xla"
    return requested


# Option -> the values that --backend jax accepts, and the reason why it accepts no others.
_TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "attention": (("auto", "xla", "pallas"), "needs --backend torch"),
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
