"""The CUDA card on which figures were measured, with its clocks and the versions of libraries."""

import platform
import shutil
import subprocess
from typing import Any

import torch

FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw"),
    *("power.limit", "temperature.gpu", "utilization.gpu", "memory.used"),
)


def clocks() -> dict[str, str]:
    """Return nvidia-smi's values for the first card, or why there are none; changes nothing."""
    if shutil.which("nvidia-smi") is None:
        return {"nvidia-smi": "is not there"}
    asked = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": str(error)}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if done.returncode or len(values) != len(FIELDS):
        said = (done.stderr or done.stdout).strip()
        return {"nvidia-smi": f"ended with {done.returncode}: {said}"}
    return dict(zip(FIELDS, values, strict=True))


def card(device: torch.device) -> dict[str, Any]:
    """The device and the versions that its figures depend on."""
    versions = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "triton": _triton(),
        "python": platform.python_version(),
    }
    if device.type != "cuda":
        return {"device": "cpu"} | versions
    about = torch.cuda.get_device_properties(device)
    return {
        "device": about.name,
        "sm": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory MiB": about.total_memory >> 20,
    } | versions


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
