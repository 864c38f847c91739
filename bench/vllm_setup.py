"""The environment of vLLM's CPU build: the CPUs of its threads, and libraries that come first.

As its guide says (docs.vllm.ai, Installation, CPU): one OpenMP thread on each physical core, and
tcmalloc and libiomp5 in LD_PRELOAD. Left alone, some of its versions keep one core for themselves.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BINDING, PRELOAD = "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD"
# By the beginning of the library's name: the package that has it. The first that is found counts.
LIBRARIES = {
    "libtcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "libiomp": ("libiomp5.so",),
}
PACKAGES = {"libtcmalloc": "libtcmalloc-minimal4 (apt)", "libiomp": "intel-openmp (pip)"}
SYSTEM = (Path("/usr/lib"), Path("/usr/local/lib"))
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Setup:
    """The environment of vLLM's process, and a sentence about it for the reader of its figures."""

    environment: dict[str, str]
    about: str


def vllm_setup(
    python: Path,
    threads: int,
    environment: Mapping[str, str] = os.environ,
    system: Sequence[Path] = SYSTEM,
) -> Setup:
    """Return how to start vLLM with as many threads as the other scorers.

    A binding that the environment has is left alone, and so are libraries that it preloads.

    Args:
        python: the interpreter of vLLM's virtual environment.
        threads: number of threads.
        environment: of this process.
        system: folders with libraries, searched after the virtual environment.

    Raises:
        ValueError: there are fewer CPUs than threads.
    """
    binding = environment.get(BINDING) or ",".join(map(str, cpus(threads)))
    given = environment.get(PRELOAD, "").replace(":", " ").split()
    folders = [prefix(python), *system]
    found = {kind: _given(kind, given) or find(kind, folders) for kind in LIBRARIES}
    new = [str(path) for path in found.values() if path and str(path) not in given]
    told = [
        str(path) if path else f"no {kind}, which would make it faster: install {PACKAGES[kind]}"
        for kind, path in found.items()
    ]
    made = dict(environment) | {BINDING: binding, "OMP_NUM_THREADS": str(threads)}
    made |= {PRELOAD: ":".join([*new, *given])} if new or given else {}
    return Setup(made, f"vLLM: threads on CPUs {binding}; preloaded: {'; '.join(told)}")


def cpus(threads: int, sysfs: Path = _CPUS) -> list[int]:
    """Return CPUs that this process may use: one of each physical core first, then the others."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < threads:
        raise ValueError(f"{threads} threads on {len(allowed)} CPUs")
    seen: set[str] = set()
    first = []
    for cpu in allowed:
        file = sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = file.read_text() if file.is_file() else str(cpu)
        if core not in seen:
            first.append(cpu)
        seen.add(core)
    return sorted([*first, *(cpu for cpu in allowed if cpu not in first)][:threads])


def prefix(python: Path) -> Path:
    """Return the folder of an interpreter's virtual environment."""
    code = "import sys; print(sys.prefix)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def find(kind: str, folders: list[Path]) -> Path | None:
    """Return the first library of a kind below `folders`."""
    for folder in folders:
        for name in LIBRARIES[kind]:
            if found := sorted(folder.rglob(name)):
                return found[0]
    return None


def _given(kind: str, preloaded: list[str]) -> Path | None:
    return next((Path(path) for path in preloaded if Path(path).name.startswith(kind)), None)
