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

    It needs neither torch nor JAX. The description holds no name of a machine or user.
    """
    cpu = _cpuinfo("model name") or platform.processor() or platform.machine()
    machine: dict[str, Any] = {"system": platform.system(), "cpu": cpu, "cores": os.cpu_count()}
    clock = _cpuinfo("cpu MHz")
    machine |= {"cpu_clock": f"{float(clock):.0f} MHz"} if clock else {}
    return machine | ({"gpus": _gpus()} if _gpus() else {})


@cache
def commit() -> str | None:
    """Return the commit that this package comes from; None if it is not known.

    It is the commit of the checkout that the package is imported from, or that its wheel was built
    from. "-dirty" at its end says that files were changed.
    """
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


def _cpuinfo(name: str) -> str | None:
    """Return a field of the first core in Linux's /proc/cpuinfo; None if there is none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith(name)), None)


_GPU_FIELDS = ("name", "clocks.max.sm", "clocks.max.memory", "power.limit", "driver_version")


@cache
def _gpus() -> tuple[str, ...]:
    """Return each GPU's name, highest clocks, power limit and driver, as nvidia-smi shows them."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # the driver is broken
        return ()
    return tuple(done.stdout.splitlines()) if done.returncode == 0 else ()
