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

# JAX takes a part of a GPU's memory at its first use, three quarters if these do not say else.
# Without that its allocator doubles the region that it asks for each time, so that pages of more
# than half of the memory have no room.
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARE = 0.9  # of the memory that torch has left; the rest is for libraries

CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}  # as --device calls them


def find_device(wanted: str) -> jax.Device:
    """Return the first device of that kind; "auto" is JAX's own choice.

    Raises:
        ConfigError: JAX sees no such device, or chose the CPU of a machine with an NVIDIA device.
    """
    leave_torch_its_memory()
    try:
        device: jax.Device = (jax.devices() if wanted == "auto" else jax.devices(wanted))[0]
    except RuntimeError as error:
        there = ", ".join(sorted({kind_of(device) for device in jax.devices()}))
        raise ConfigError(
            f"--device {wanted}: this JAX sees no such device; supported here: {there}"
        ) from error
    node = nvidia_device() if wanted == "auto" and device.platform == "cpu" else None
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

    A value of the user stays, and so does JAX's choice once it has begun to use the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or {FRACTION, OLD_FRACTION} & {*os.environ}:
        return
    free, total = torch.cuda.mem_get_info()
    os.environ[FRACTION] = f"{min(0.75, SHARE * free / total):.3f}"


def kind_of(device: jax.Device) -> str:
    """Return cpu, cuda or tpu; raises ConfigError for any other device."""
    if device.platform not in KINDS:
        raise ConfigError(f"--device: JAX's device is {device.platform}; supported: cpu, cuda, tpu")
    return KINDS[device.platform]


def free_memory(device: jax.Device) -> int:
    """Bytes that this process can still take; on a CPU, of the machine's or container's memory."""
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
        what: was being made, with its size.
        remedy: settings that may help.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"JAX cannot make {what}: {error}; {remedy}") from error
