"""JAX's devices, and how much memory they have. The first import of JAX of the program is here."""

import os

# Otherwise JAX takes three quarters of a GPU's memory at its first use. Pages are allocated once,
# at start, and another framework may share the device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from gpuscore.backends.common.memory import HostMemory
from gpuscore.errors import ConfigError

KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}  # as --device calls them


def find_device(wanted: str) -> jax.Device:
    """The first device of that kind; "auto" is JAX's own choice.

    Raises:
        ConfigError: JAX sees none.
    """
    try:
        device: jax.Device = (jax.devices() if wanted == "auto" else jax.devices(wanted))[0]
    except RuntimeError as error:
        there = ", ".join(sorted({kind_of(device) for device in jax.devices()}))
        raise ConfigError(
            f"--device {wanted}: this JAX sees no such device; supported here: {there}"
        ) from error
    return device


def kind_of(device: jax.Device) -> str:
    """cpu, cuda or tpu; raises ConfigError for anything else."""
    if device.platform not in KINDS:
        raise ConfigError(f"--device: JAX's device is {device.platform}; supported: cpu, cuda, tpu")
    return KINDS[device.platform]


def free_memory(device: jax.Device) -> int:
    """Bytes that this process can still take; of a CPU, what the machine or container leaves."""
    stats = device.memory_stats()
    if stats is None:
        return HostMemory().free()
    return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])


def keep_programs(directory: str) -> None:
    """Keep compiled programs in `directory`, for the whole process and later ones."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
