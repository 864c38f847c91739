"""How much memory there is, and how much a run takes at its peak; one reader per kind of device."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gpuscore.heap import trim

_RESET_PEAK = "5"  # what resets VmHWM, see proc_pid_clear_refs(5)
# What glibc's heaps of 64 MiB may hold in fragments after batches of many sizes: as much again as
# those that were measured, and never seen over 150 MiB, because blocks of more than half a heap are
# given back at once.
_FRAGMENTS = 3 * 2**26
# Limit, use and statistics of a container's memory: cgroup v2, then v1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


class Memory(Protocol):
    """The memory that weights, batches and pages share."""

    def free(self) -> int:
        """Bytes that this process can still take."""

    def growth(self, run: Callable[[], object]) -> int | None:
        """Run it; by how many bytes this process grew at the most meanwhile.

        None where that cannot be known.
        """

    def trim(self) -> None:
        """Give back what was freed but kept for later."""


class HostMemory:
    """The machine's memory, or what a container may have of it.

    Args:
        proc: the mounted /proc.
        cgroup: the mounted cgroup file system.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup

    def free(self) -> int:
        """Mapped files, weights among them, count as available to the kernel, but not here."""
        there = min(available_bytes(self._proc / "meminfo"), cgroup_bytes(self._cgroup))
        return max(0, there - (self._status("RssFile") or 0))

    def growth(self, run: Callable[[], object]) -> int | None:
        """From the kernel's own record of the largest resident size, which Linux has.

        With what may come to lie in fragments between batches of other sizes.
        """
        self.trim()
        known = self._reset_peak()
        before = self._status("VmRSS")
        run()
        peak = self._status("VmHWM")
        if not known or before is None or peak is None:
            return None
        grown = max(0, peak - before)
        return grown + min(grown, _FRAGMENTS)

    def trim(self) -> None:
        trim()

    def _reset_peak(self) -> bool:
        try:
            (self._proc / "self" / "clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return False
        return True

    def _status(self, name: str) -> int | None:
        """A size in bytes of this process; None where the system does not tell."""
        return _kilobytes(self._proc / "self" / "status", name)


def available_bytes(meminfo: Path) -> int:
    """What the machine can give without swapping; all of it where there is no /proc."""
    available = _kilobytes(meminfo, "MemAvailable")
    if available is not None:
        return available
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_bytes(cgroup: Path) -> int:
    """What a container's own limit leaves, which /proc/meminfo does not know.

    Cached files, such as a checkpoint just read, count as used there but are given up when needed.
    """
    for names in _CGROUP_FILES:
        limit, used, stat = (cgroup / name for name in names)
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
            return int(text) - int(used.read_text()) + _cached_files(stat)
    return sys.maxsize


def _cached_files(stat: Path) -> int:
    if not stat.is_file():
        return 0
    rows = (line.split() for line in stat.read_text().splitlines())
    return sum(int(size) for name, size in rows if name in ("active_file", "inactive_file"))


def _kilobytes(path: Path, name: str) -> int | None:
    """The bytes of a line such as "VmRSS:    1636 kB"."""
    if not path.is_file():
        return None
    rows = (line.split() for line in path.read_text().splitlines())
    return next((int(row[1]) * 1024 for row in rows if row and row[0] == f"{name}:"), None)
