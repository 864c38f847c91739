"""What to load, in which dtype, and how much of it: decided before any weight is read."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuscore.backends.torch.compiler import use_compiler
from gpuscore.backends.torch.deterministic import TILING, steady_threads
from gpuscore.backends.torch.hf_config import DecoderConfig, RawConfig
from gpuscore.backends.torch.kv_pool import bytes_per_token
from gpuscore.backends.torch.models import Family, read_family
from gpuscore.backends.torch.models.decoder import weight_shapes
from gpuscore.backends.torch.models.names import layer_weights
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types import BackendLimits

PAGE_SIZE = {"cpu": 16, "cuda": 64}
MAX_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
KV_FRACTION = 0.5  # of the memory that is left once the weights are in


@dataclass(frozen=True, slots=True)
class BackendPlan:
    """Everything `TorchBackend` needs, checked; making one reads config.json and nothing else."""

    directory: str
    family: Family
    device: torch.device
    dtype: torch.dtype
    limits: BackendLimits
    weight_bytes: int
    kv_bytes: int
    threads: int | None
    compile: bool


def plan_backend(directory: Path, config: ModelConfig) -> BackendPlan:
    """Raises ConfigError, in one sentence, for whatever cannot be served."""
    family = read_family(RawConfig.read(directory))
    device = _device(config.device)
    dtype = _dtype(family.config, config.dtype, device)
    max_len = _max_model_len(family.config, config.max_model_len)
    weight_bytes = count_parameters(family.config) * dtype.itemsize
    page_size = PAGE_SIZE[device.type]
    per_page = page_size * bytes_per_token(family.config, dtype)
    num_pages = _num_pages(config, max_len, page_size, per_page, weight_bytes, device)
    limits = BackendLimits(
        max_tokens=_max_tokens(config, device),
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_len,
        vocab_rows=family.config.vocab_size,
        identity=f"{directory} {config.revision} {dtype}",
        deterministic_chunk=TILING.block if config.deterministic else 0,
    )
    return BackendPlan(
        directory=str(directory),
        family=family,
        device=device,
        dtype=dtype,
        limits=limits,
        weight_bytes=weight_bytes,
        kv_bytes=num_pages * per_page,
        threads=_threads(family.config, config, device),
        compile=use_compiler(config.compile, device, count_parameters(family.config)),
    )


def _threads(model: DecoderConfig, config: ModelConfig, device: torch.device) -> int | None:
    if not config.deterministic or device.type != "cpu":
        return config.threads
    threads = config.threads or torch.get_num_threads()
    steady = steady_threads(model, threads)
    if config.threads is not None and steady < threads:
        raise ConfigError(
            f"--threads {threads} do not share this model's work evenly, which --deterministic "
            f"needs; the next lower number that does is {steady}"
        )
    return steady


def _max_tokens(config: ModelConfig, device: torch.device) -> int:
    limit = config.max_batch_tokens or MAX_BATCH_TOKENS[device.type]
    if config.deterministic and limit < TILING.block:
        raise ConfigError(
            f"--max-batch-tokens {limit} is under the {TILING.block} of --deterministic"
        )
    return limit


def count_parameters(config: DecoderConfig) -> int:
    """Parameters of the model, a tied head counted once."""
    shapes = weight_shapes(config)
    experts = config.mixture.num_experts if config.mixture is not None else 0
    in_layers = sum(
        shapes[part].numel() * (experts if "{expert}" in name else 1)
        for layer in range(config.num_layers)
        for part, name in layer_weights(config, layer).items()
    )
    heads = 1 if config.tie_word_embeddings else 2
    return in_layers + heads * shapes["embed"].numel() + shapes["final_norm"].numel()


def _dtype(config: DecoderConfig, wanted: str, device: torch.device) -> torch.dtype:
    name = config.checkpoint_dtype if wanted == "auto" else wanted
    if name not in config.dtypes:
        raise ConfigError(
            f"--dtype {wanted} is {name}, in which {config.architecture} overflows; "
            f"supported: {', '.join(config.dtypes)}"
        )
    dtype: torch.dtype = getattr(torch, name)
    if wanted == "auto" and device.type == "cpu" and not _computes_natively(dtype):
        return torch.float32  # holds every bfloat16 and float16 value, and is several times faster
    return dtype


def _computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for matrix products in `dtype`, as oneDNN sees it."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no CUDA device; supported here: cpu")
    return torch.device(name)


def _max_model_len(config: DecoderConfig, wanted: int | None) -> int:
    limit = config.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted} is over the model's max_position_embeddings {limit}"
        )
    return wanted or limit


def _num_pages(
    config: ModelConfig,
    max_len: int,
    page_size: int,
    per_page: int,
    weight_bytes: int,
    device: torch.device,
) -> int:
    """Enough for one prompt of full length; by default for several, as memory allows."""
    needed = -(-max_len // page_size) + 1  # a long item recomputes up to one page of its query
    if config.kv_cache_tokens is not None:
        pages = -(-config.kv_cache_tokens // page_size)
    else:
        room = int((_free_bytes(device) - weight_bytes) * KV_FRACTION) // per_page
        pages = min(max(4 * needed, -(-65536 // page_size)), room)
    if pages < needed:
        raise ConfigError(
            f"a prompt of --max-model-len {max_len} needs {needed * page_size} tokens of KV cache, "
            f"{max(pages, 0) * page_size} are available; lower --max-model-len "
            "or raise --kv-cache-tokens"
        )
    return pages


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available_bytes(Path("/proc/meminfo")), _cgroup_bytes(Path("/sys/fs/cgroup")))


def _available_bytes(meminfo: Path) -> int:
    """What the machine can give without swapping; all of it where there is no /proc."""
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes(cgroup: Path) -> int:
    """What a container's own limit leaves (cgroup v2), which /proc/meminfo does not know."""
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        return int(text) - int(used.read_text())
    return sys.maxsize
