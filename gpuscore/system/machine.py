"""This machine, the software on it, and the commit of this package's code."""

import os
import platform
import shutil
import subprocess
from functools import cache
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


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect scores."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def local_machine() -> dict[str, Any]:
    """Describe this machine's system, CPU and NVIDIA GPUs with their clocks.

    Needs no framework; the description has no names of machines or users.
    """
    machine: dict[str, Any] = {"system": platform.system(), "cpu": _cpu(), "cores": os.cpu_count()}
    clock = _of_cpu("cpu MHz")
    machine |= {"cpu_clock": f"{float(clock):.0f} MHz"} if clock else {}
    return machine | ({"gpus": _gpus()} if _gpus() else {})


@cache
def commit() -> str | None:
    """Return the commit of the checkout that this package is imported from, or that its wheel was
    built from, with "-dirty" if files in it were changed; None if it came from neither."""
    root = Path(__file__).parents[2]
    built = root / "gpuscore" / "commit.txt"  # hatch_build.py
    if built.exists():
        return built.read_text(encoding="utf-8").strip()
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def _cpu() -> str:
    return _of_cpu("model name") or platform.processor() or platform.machine()


def _of_cpu(name: str) -> str | None:
    """Return a field of the first core, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith(name)), None)


_GPU_FIELDS = ("name", "clocks.max.sm", "clocks.max.memory", "power.limit", "driver_version")


@cache
def _gpus() -> tuple[str, ...]:
    """Return each GPU's name, highest clocks, limit of power and driver, by nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # a driver that is broken tells nothing
        return ()
    return tuple(done.stdout.splitlines()) if done.returncode == 0 else ()
