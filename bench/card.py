"""The card on which figures were measured: its name, its limits, the versions of libraries."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sensors import limits

from gpuscore.system.machine import local_machine

PACKAGES = ("triton", "transformers", "numpy", "jax", "flashinfer-python", "nvidia-ml-py")


def card(device: str) -> dict[str, Any]:
    """Return the device, cuda or cpu, and the versions that its figures depend on."""
    import torch  # slow to import, and the tests of the day need none

    machine = local_machine()
    versions = {
        "host": f"{machine['cpu']}, {machine['cores']} cores",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
    if device != "cuda":
        return {"device": "cpu"} | versions
    about = torch.cuda.get_device_properties(device)
    return {
        "device": about.name,
        "sm": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory MiB": about.total_memory >> 20,
        **limits(),
    } | versions


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
