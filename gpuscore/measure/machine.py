"""Description of the machine and the software that made a result."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "gpuscore",
    "torch",
    "triton",
    "flashinfer-python",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
)
# What XLA and libtpu read; some of their flags change the order of sums.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")


def environment() -> dict[str, str]:
    """Return the variables that affect scores and are set; local paths in them are left out."""
    return {
        name: re.sub(r"=\S*[/\\]\S*", "=PATH", os.environ[name])
        for name in _VARIABLES
        if os.environ.get(name)
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect scores."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(framework: str) -> dict[str, Any]:
    """Describe the CPU, and a GPU that torch finds or a TPU that JAX finds.

    The description has no names of machines or users.
    """
    import torch

    found: dict[str, Any] = {
        "system": platform.system(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    if framework == "jax":
        import jax

        if jax.default_backend() == "tpu":
            found["tpu"] = jax.devices()[0].device_kind
    return found


def hardware_text(found: object) -> str:
    """Return what computes, of a description by `hardware`; of another one "unknown"."""
    parts = found if isinstance(found, dict) else {}
    named = [str(parts[name]) for name in ("tpu", "gpu", "cpu") if name in parts]
    return ", ".join(named) or "unknown"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
