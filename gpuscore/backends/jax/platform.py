"""JAX's devices and their free memory. The program imports JAX here first."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import jax

from gpuscore.backends.common.memory import HostMemory
from gpuscore.backends.common.plan import nvidia_device
from gpuscore.errors import ConfigError

# JAX allocates three quarters of a GPU's memory at its first use; these variables change that.
# Without preallocation its allocator doubles its region step by step, and then cannot provide pages
# that take more than half of the memory.
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
FREE_FRACTION = 0.9  # of the memory that torch has left free; the rest is for libraries

CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}  # as --device calls them


def find_device(requested: str) -> jax.Device:
    """Return the first device of a kind; "auto" is JAX's own choice.

    Raises:
        ConfigError: JAX sees no such device, or chose the CPU of a machine with an NVIDIA device.
    """
    leave_torch_its_memory()
    try:
        device: jax.Device = (jax.devices() if requested == "auto" else jax.devices(requested))[0]
    except RuntimeError as error:
        kinds = ", ".join(sorted({kind_of(device) for device in jax.devices()}))
        raise ConfigError(
            f"--device {requested}: this JAX sees no such device; supported here: {kinds}"
        ) from error
    node = nvidia_device() if requested == "auto" and device.platform == "cpu" else None
    if node is not None:
        installed = any(map(find_spec, CUDA_PLUGINS))
        why = "the log has JAX's reason" if installed else "this is JAX without CUDA"
        raise ConfigError(
            f"--device auto: this machine has an NVIDIA device, {node}, that JAX cannot use: "
            f"{why}; make it usable, or choose --device cpu"
        )
    return device


def leave_torch_its_memory() -> None:
    """Let JAX take a part of the free memory if torch in this process uses the GPU already.

    The user's own value is kept. There is no effect once JAX has begun to use the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or {FRACTION, OLD_FRACTION} & {*os.environ}:
        return
    free, total = torch.cuda.mem_get_info()
    os.environ[FRACTION] = f"{min(0.75, FREE_FRACTION * free / total):.3f}"


def kind_of(device: jax.Device) -> str:
    """Return cpu, cuda or tpu; raise ConfigError for any other device."""
    if device.platform not in KINDS:
        raise ConfigError(f"--device: JAX's device is {device.platform}; supported: cpu, cuda, tpu")
    return KINDS[device.platform]


def free_memory(device: jax.Device) -> int:
    """Return the bytes that this process can still take, on a CPU of the machine's memory."""
    stats = device.memory_stats()
    if stats is None:
        return HostMemory().free()
    limit = int(stats["bytes_limit"])
    taken = int(stats.get("pool_bytes", 0))
    if taken and os.environ.get(PREALLOCATE, "true") not in ("false", "False", "0"):
        limit = min(limit, taken)  # less than the limit, if other processes have the rest
    return limit - int(stats["bytes_in_use"])


def kept_programs() -> str | None:
    """Return the directory that JAX_COMPILATION_CACHE_DIR names, which keeps all programs."""
    directory: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


@contextmanager
def as_config_error(what: str, remedy: str) -> Iterator[None]:
    """Turn an error of XLA at start into a ConfigError.

    Args:
        what: what JAX was making, with its size.
        remedy: settings that may help.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"JAX cannot make {what}: {error}; {remedy}") from error
