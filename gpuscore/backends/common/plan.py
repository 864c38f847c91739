"""What every backend decides in the same way before it reads a weight."""

from collections.abc import Callable

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.shapes import bytes_per_token
from gpuscore.backends.common.sizing import PagePlan, mebibytes
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

# Of each kind of device.
PAGE_SIZE = {"cpu": 16, "cuda": 64, "tpu": 64}
MAX_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384, "tpu": 16384}
# Of the memory that weights and the largest batch leave. On a GPU the rest is for fragmentation; on
# a CPU also for the server's own process, the requests that wait, and whatever else runs there.
MEMORY_FRACTION = {"cpu": 0.7, "cuda": 0.9, "tpu": 0.9}
CPU_PROMPTS, CPU_TOKENS = 4, 65536  # pages for so many full prompts, and at least so many tokens
ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes


def choose_dtype(
    config: DecoderConfig, wanted: str, device: str, computes: Callable[[str], bool]
) -> str:
    """The name of the number format; raises ConfigError for one in which the model overflows.

    Args:
        config: the model.
        wanted: a name, or "auto": the checkpoint's own, but float32 on a CPU that cannot.
        device: kind of device.
        computes: whether the CPU has instructions for matrix products in that format.
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


def check_weights(pages: PagePlan, free: int, weight_bytes: int) -> None:
    """Refuse at once, and not after the weights were read, what cannot fit even beside no batch.

    Args:
        pages: the plan.
        free: bytes that the device can give.
        weight_bytes: of the weights in the number format in which they are loaded.

    Raises:
        ConfigError: the weights, or one prompt's pages beside them, do not fit.
    """
    if weight_bytes > free:
        raise ConfigError(
            f"the weights that config.json asks for take {mebibytes(weight_bytes)}, and "
            f"{mebibytes(free)} of memory are free; choose a smaller model, or --dtype bfloat16 "
            "instead of float32"
        )
    pages.count(free - weight_bytes, 0)


def plan_pages(
    config: DecoderConfig, wanted: ModelConfig, max_len: int, dtype: str, device: str, again: int
) -> PagePlan:
    """The pages of `device`, a kind of device, in `dtype`.

    Args:
        again: tokens of its query that a long item computes again, at most.
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
    )
