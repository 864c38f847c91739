"""This machine, the software on it, and the commit that this package is of."""

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
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def local_machine() -> dict[str, Any]:
    """Describe this machine's system and CPU, without a framework and without names."""
    return {"system": platform.system(), "cpu": _cpu(), "cores": os.cpu_count()}


@cache
def commit() -> str | None:
    """Return the commit of the checkout that this package is imported from, with "-dirty" if files
    in it were changed; None if it is not a checkout."""
    root = Path(__file__).parents[2]
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
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
