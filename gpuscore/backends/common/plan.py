"""Decisions that every backend takes in the same way before it reads a weight."""

from collections.abc import Callable

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.shapes import bytes_per_token
from gpuscore.backends.common.sizing import PagePlan, mebibytes
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

# Memory that an engine's process takes beside what it plans: its interpreter, libraries, and on a
# GPU the context and the kernels' code. Only the shares of several models need it.
ENGINE_BYTES = {"cpu": 2**29, "cuda": 2**30}
# By kind of device.
PAGE_SIZE = {"cpu": 16, "cuda": 64, "tpu": 64}
MAX_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384, "tpu": 16384}
# Share of the memory left by weights and the largest batch that pages may take. On a GPU the rest
# covers fragmentation; on a CPU also the server's process, waiting requests and other programs.
MEMORY_FRACTION = {"cpu": 0.7, "cuda": 0.9, "tpu": 0.9}
CPU_PROMPTS, CPU_TOKENS = 4, 65536  # at most: pages of 4 full prompts, or of 65536 tokens if more
ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes


def choose_dtype(
    config: DecoderConfig, wanted: str, device: str, computes: Callable[[str], bool]
) -> str:
    """Return the name of the dtype; raises ConfigError for one in which the model overflows.

    Args:
        config: the model.
        wanted: a name, or "auto": the checkpoint's own, or float32 on a CPU that does not compute
            in it.
        device: kind of device.
        computes: tells for a dtype whether the CPU has instructions for its matrix products.
    """
    name = config.checkpoint_dtype if wanted == "auto" else wanted
    if name not in config.dtypes:
        raise ConfigError(
            f"--dtype {wanted} is {name}, in which {config.architecture} overflows; "
            f"supported: {', '.join(config.dtypes)}"
        )
    if wanted == "auto" and device == "cpu" and not computes(name):
        return "float32"  # holds every bfloat16 and float16 value, and is several times faster
    return name


def choose_max_model_len(config: DecoderConfig, wanted: int | None) -> int:
    limit = config.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted} is over the model's max_position_embeddings {limit}"
        )
    return wanted or limit


def check_weights(pages: PagePlan, free: int, weight_bytes: int, limit: int | None = None) -> None:
    """Refuse, before weights are read, a model that would not fit even without any batch.

    Args:
        pages: the plan of KV pages.
        free: bytes that the device can give.
        weight_bytes: size of the weights in the dtype in which they are loaded.
        limit: `--memory-limit`.

    Raises:
        ConfigError: the weights, or the weights and one prompt's pages, do not fit.
    """
    if weight_bytes > free:
        raise ConfigError(
            f"the weights that config.json asks for take {mebibytes(weight_bytes)}, and "
            f"{mebibytes(free)} of memory are free; choose a smaller model, a --dtype or "
            "--quantization with fewer bytes per weight, or divide it with --tensor-parallel"
        )
    if limit is not None and weight_bytes > limit:
        raise ConfigError(
            f"the weights that config.json asks for take {mebibytes(weight_bytes)}, over the "
            f"--memory-limit of {mebibytes(limit)}"
        )
    pages.count(free - weight_bytes, 0)


def plan_pages(
    config: DecoderConfig,
    wanted: ModelConfig,
    max_len: int,
    dtype: str,
    device: str,
    again: int,
    weight_bytes: int,
) -> PagePlan:
    """Plan the KV pages.

    Args:
        config: the model.
        wanted: the settings.
        max_len: tokens of the longest prompt.
        dtype: of keys and values.
        device: kind of device.
        again: query tokens that a long item computes again, at most.
        weight_bytes: size of the weights, which count towards `--memory-limit`.

    Raises:
        ConfigError: two settings size the KV cache.
    """
    if wanted.kv_cache_size is not None and wanted.memory_fraction is not None:
        raise ConfigError("--kv-cache-size and --memory-fraction both size the KV cache; set one")
    size = PAGE_SIZE[device]
    needed = -(-max_len // size) + max(1, again // size)
    return PagePlan(
        size=size,
        page_bytes=size * bytes_per_token(config, ITEM_SIZE[dtype]),
        max_model_len=max_len,
        needed=needed,
        most=max(CPU_PROMPTS * needed, CPU_TOKENS // size) if device == "cpu" else None,
        fraction=wanted.memory_fraction or MEMORY_FRACTION[device],
        exact_bytes=wanted.kv_cache_size,
        spare=None if wanted.memory_limit is None else max(0, wanted.memory_limit - weight_bytes),
    )
