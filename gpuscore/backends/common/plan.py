"""What all backends decide alike at start: the dtype, the number of KV pages, whether a model fits.

KV pages get a fraction of the memory that the weights and the largest batch leave.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.linear_layers import refuse_with_states
from gpuscore.backends.common.memory import Memory
from gpuscore.backends.common.quantization import Precision, choose_precision
from gpuscore.backends.common.shapes import (
    bytes_per_state,
    bytes_per_token,
    count_weight_bytes,
)
from gpuscore.backends.common.shards import Shard, refuse_quantized, settings_of_a_rank
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

Run: TypeAlias = Callable[[], object]

UNMEASURED = 0.5  # fraction of free memory kept for the largest batch if it cannot be measured


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes that were free after loading the weights, and bytes that the largest batch took."""

    free: int
    batch: int
    estimated: bool  # `batch` is a guess, because the system does not report peak memory


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The rule for the number of pages. `count` applies it once free memory is known."""

    size: int  # tokens of a page
    page_bytes: int  # bytes of a page, over all layers
    max_model_len: int
    needed: int  # pages of one prompt of `max_model_len`
    most: int | None  # upper bound; None = as many as fit
    fraction: float  # of the memory that weights and the largest batch leave
    exact_bytes: int | None  # bytes of all pages; replaces `most` and `fraction`
    num_states: int = 0  # slots for states of linear layers
    state_bytes: int = 0  # bytes of all these slots

    def count(self, free: int, batch: int) -> int:
        """Return the number of pages.

        Args:
            free: bytes that the weights leave.
            batch: bytes that the largest batch takes of `free`.

        Raises:
            ConfigError: the pages cannot hold one prompt of full length, or `exact_bytes` do not
                fit.
        """
        available = max(0, free - batch - self.state_bytes)
        memory = f"the weights leave {mebibytes(free)}, the largest batch takes {mebibytes(batch)}"
        if self.num_states:
            memory += f", {self.num_states} states of linear layers {mebibytes(self.state_bytes)}"
        if self.exact_bytes is None:
            pages = int(available * self.fraction) // self.page_bytes
            pages = pages if self.most is None else min(pages, self.most)
            self._check(pages, f"{memory}, {self.fraction:g} of the rest is for pages", "")
            return pages
        pages = self.exact_bytes // self.page_bytes
        self._check(pages, "", " or raise --kv-cache-size")
        if self.exact_bytes > available:
            raise ConfigError(
                f"--kv-cache-size is {mebibytes(self.exact_bytes)}, but {memory}; lower "
                "--kv-cache-size or --max-batch-tokens"
            )
        return pages

    def describe(self, count: int) -> str:
        """Return the size of `count` pages as text."""
        return f"{mebibytes(count * self.page_bytes)}: {count} pages, {count * self.size} tokens"

    def _check(self, pages: int, why: str, remedy: str) -> None:
        if pages >= self.needed:
            return
        raise ConfigError(
            f"a prompt of --max-model-len {self.max_model_len} needs {self.needed * self.size} "
            f"tokens of KV cache, {mebibytes(self.needed * self.page_bytes)}, "
            f"{pages * self.size} are available{f' ({why})' if why else ''}; "
            f"lower --max-model-len{remedy or ' or --max-batch-tokens'}"
        )


def measure(memory: Memory, *parts: Run) -> MeasuredMemory:
    """Measure free memory, and how much more is taken while `parts` run the largest batches."""
    memory.trim()
    free = memory.free()
    peak = memory.growth(*parts)
    memory.trim()
    guess = int(free * UNMEASURED)
    return MeasuredMemory(free, guess if peak is None else peak, estimated=peak is None)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


NODES = Path("/dev")
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all devices


def nvidia_device() -> Path | None:
    """Return the file of an NVIDIA device, unless CUDA_VISIBLE_DEVICES hides it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return None
    return next(iter(sorted(NODES.glob("nvidia[0-9]*"))), None)


# Defaults for each kind of device.
PAGE_SIZE = {"cpu": 16, "cuda": 64, "tpu": 64}
MAX_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384, "tpu": 16384}
# The fraction for pages of the memory that weights and the largest batch leave. On a GPU the rest
# covers fragmentation; on a CPU also the server's process, waiting requests and other programs.
MEMORY_FRACTION = {"cpu": 0.7, "cuda": 0.9, "tpu": 0.9}
# Slots for states of linear layers: as many as fit STATE_BYTES, within these bounds. A running
# request needs up to four of them, the others hold cached states.
STATE_BYTES = 2**31
LEAST_STATES = 8
MOST_STATES = 64
# On a CPU the pages hold at most CPU_PROMPTS full prompts or CPU_TOKENS tokens, whichever is more.
CPU_PROMPTS = 4
CPU_TOKENS = 65536
ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes


def choose_dtype(
    config: DecoderConfig, requested: str, device: str, computes: Callable[[str], bool]
) -> str:
    """Return the dtype's name; raise ConfigError for a dtype in which the model overflows.

    Args:
        config: the model.
        requested: a name, or "auto": the checkpoint's dtype, or float32 on a CPU without
            instructions for that dtype.
        device: kind of device.
        computes: returns whether the CPU has instructions for matrix products in a dtype.
    """
    is_auto = requested == "auto"
    name = config.checkpoint_dtype if is_auto else requested
    if name not in config.dtypes:
        raise ConfigError(
            f"--dtype {requested} is {name}, in which {config.architecture} overflows; "
            f"supported: {', '.join(config.dtypes)}"
        )
    if is_auto and device == "cpu" and not computes(name):
        return "float32"  # holds every bfloat16 and float16 value, and is several times faster
    return name


def choose_max_model_len(config: DecoderConfig, requested: int | None) -> int:
    limit = config.max_position_embeddings
    if requested is not None and requested > limit:
        raise ConfigError(
            f"--max-model-len {requested} is over the model's max_position_embeddings {limit}"
        )
    return requested or limit


def check_weights(pages: PagePlan, free: int, weight_bytes: int) -> None:
    """Refuse, before weights are read, a model that would not fit even without any batch.

    Args:
        pages: the plan of KV pages.
        free: bytes that are free on the device.
        weight_bytes: size of the weights in the dtype in which they are loaded.

    Raises:
        ConfigError: the weights, or the weights and one prompt's pages, do not fit.
    """
    if weight_bytes > free:
        raise ConfigError(
            f"the weights that config.json describes take {mebibytes(weight_bytes)}, and "
            f"{mebibytes(free)} of memory are free; choose a smaller model or a --dtype "
            "with fewer bytes per weight, or divide it with --tensor-parallel"
        )
    pages.count(free - weight_bytes, 0)


def plan_pages(
    config: DecoderConfig,
    settings: ModelConfig,
    *,
    max_len: int,
    dtype: str,
    device: str,
    recomputed: int,
) -> PagePlan:
    """Plan the KV pages.

    Args:
        config: the model.
        settings: the server's settings.
        max_len: tokens of the longest prompt.
        dtype: the dtype of keys and values.
        device: kind of device.
        recomputed: most tokens of a query that are computed again for a long item.

    Raises:
        ConfigError: two settings size the KV cache.
    """
    if settings.kv_cache_size is not None and settings.memory_fraction is not None:
        raise ConfigError("--kv-cache-size and --memory-fraction both size the KV cache; set one")
    size = PAGE_SIZE[device]
    needed = -(-max_len // size) + max(1, recomputed // size)
    state = bytes_per_state(config, ITEM_SIZE[dtype])
    num_states = min(MOST_STATES, max(LEAST_STATES, STATE_BYTES // state)) if state else 0
    return PagePlan(
        size=size,
        page_bytes=size * bytes_per_token(config, ITEM_SIZE[dtype]),
        max_model_len=max_len,
        needed=needed,
        most=max(CPU_PROMPTS * needed, CPU_TOKENS // size) if device == "cpu" else None,
        fraction=settings.memory_fraction or MEMORY_FRACTION[device],
        exact_bytes=settings.kv_cache_size,
        num_states=num_states,
        state_bytes=num_states * state,
    )


class RankPlan(NamedTuple):
    """What torch loads on the device of one rank. This machine need not have such a device."""

    part: DecoderConfig  # the rank's part of the model
    dtype: str
    precision: Precision  # the precision of linear layers
    max_model_len: int
    weight_bytes: int
    pages: PagePlan


def plan_rank(
    architecture: Architecture,
    settings: ModelConfig,
    kind: str,
    *,
    shard: Shard,
    computes: Callable[[str], bool],
    why_not_int8: Callable[[], str | None],
    recomputed: int = 0,
) -> RankPlan:
    """Plan what one rank loads.

    Args:
        architecture: the model's architecture.
        settings: the model's settings.
        kind: the kind of the rank's device.
        shard: the rank's part of the model.
        computes: see `choose_dtype`.
        why_not_int8: see `choose_precision`.
        recomputed: see `plan_pages`.

    Raises:
        ConfigError: the model or a setting is not supported.
    """
    whole = architecture.config
    part = shard.part_of(whole)
    dtype = choose_dtype(whole, settings.dtype, kind, computes)
    max_len = choose_max_model_len(whole, settings.max_model_len)
    precision = choose_precision(settings.quantization, architecture.storage, why_not_int8)
    refuse_quantized(precision, shard.ranks)
    refuse_with_states(whole, settings, precision)
    weight_bytes = count_weight_bytes(part, ITEM_SIZE[dtype], precision)
    rank_settings = settings_of_a_rank(settings, kind)
    pages = plan_pages(
        part, rank_settings, max_len=max_len, dtype=dtype, device=kind, recomputed=recomputed
    )
    return RankPlan(part, dtype, precision, max_len, weight_bytes, pages=pages)
