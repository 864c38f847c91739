"""Free memory, and the peak growth of a run; one reader per kind of device."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gpuscore.system.heap import trim

_RESET_PEAK = "5"  # resets VmHWM, see proc_pid_clear_refs(5)
# Upper bound of what batches of other sizes take beyond the measured ones, because the memory is
# fragmented. While glibc returned large blocks, this was as much as the measured batches, but never
# over 150 MiB. Since they are kept, it was 46 MiB beyond 332, 132 beyond 293 and 23 beyond 400
# (bench/LOG.md).
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

    def growth(self, *parts: Callable[[], object]) -> int | None:
        """Call each part and return the sum of this process's peak growths meanwhile, in bytes.

        None if the system does not tell.
        """

    def trim(self) -> None:
        """Return memory to the system that was freed but that an allocator keeps for later."""


class HostMemory:
    """The machine's memory, or a container's share of it.

    Args:
        proc: the mounted /proc.
        cgroup: the mounted cgroup file system.
        parts: processes that share it equally.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        parts: int = 1,
    ) -> None:
        self._proc = proc
        self._cgroup = cgroup
        self._parts = parts

    def free(self) -> int:
        """Bytes that this process can still take.

        The kernel counts mapped files, including weights, as available; here they are not.
        """
        available = min(available_bytes(self._proc / "meminfo"), cgroup_bytes(self._cgroup))
        return max(0, available - (self.status("RssFile") or 0)) // self._parts

    def growth(self, *parts: Callable[[], object]) -> int | None:
        """Peak growths from Linux's record of the largest resident size.

        Includes an allowance for fragments between batches of other sizes (`_FRAGMENTS`).
        """
        grown = 0
        for part in parts:
            peak = self.peak(part)
            if peak is None:
                return None
            grown += peak
        return grown + min(grown, _FRAGMENTS)

    def peak(self, run: Callable[[], object]) -> int | None:
        """Peak growth of the resident size during `run`; None if the system does not tell."""
        self.trim()
        known = self._reset_peak()
        before = self.status("VmRSS")
        run()
        peak = self.status("VmHWM")
        if not known or before is None or peak is None:
            return None
        return max(0, peak - before)

    def trim(self) -> None:
        """Return freed memory that glibc keeps; other C libraries have no call for it."""
        trim()

    def _reset_peak(self) -> bool:
        try:
            (self._proc / "self" / "clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return False
        return True

    def status(self, name: str) -> int | None:
        """A size of this process in bytes; None if the system does not tell."""
        return _kilobytes(self._proc / "self" / "status", name)


def available_bytes(meminfo: Path) -> int:
    """Bytes available without swapping; the machine's whole memory if there is no /proc."""
    available = _kilobytes(meminfo, "MemAvailable")
    if available is not None:
        return available
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_bytes(cgroup: Path) -> int:
    """Bytes left under the container's limit, which /proc/meminfo does not show.

    Cached files, such as a checkpoint just read, count as used there but are dropped when needed;
    here they count as free.
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
    """Read the bytes of a line such as "VmRSS:    1636 kB"; None if there is none."""
    if not path.is_file():
        return None
    rows = (line.split() for line in path.read_text().splitlines())
    return next((int(row[1]) * 1024 for row in rows if row and row[0] == f"{name}:"), None)
