"""Wall time and CPU-seconds of one run; needs the standard library only."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Places in /proc/PID/stat behind the name: parent, then user and system time of the process, and of
# its children that have ended and were waited for; see proc_pid_stat(5).
_PARENT, _TIMES = 1, slice(11, 15)


@dataclass(frozen=True)
class Spent:
    """Wall time and CPU time of one run.

    Args:
        wall: seconds.
        cpu: seconds of all threads of this process and its descendants together, user and system.
    """

    wall: float
    cpu: float

    def of(self, count: int) -> "Spent":
        """Return both times divided by `count`."""
        return Spent(self.wall / count, self.cpu / count)


def spent(run: Callable[[], object]) -> Spent:
    cpu, start = cpu_seconds(), time.perf_counter()
    run()
    return Spent(time.perf_counter() - start, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """Return the CPU-seconds of this process and its descendants so far, the latter's to 10 ms.

    vLLM computes in a process that goes on, so the times of children that have ended do not do.
    """
    others = {pid: sum(times) for pid, times in family().items() if pid != os.getpid()}
    return sum(os.times()[:4]) + sum(others.values())


def family(root: int | None = None) -> dict[int, list[float]]:
    """Return the `_TIMES` in seconds of a process, this one by default, and all its descendants."""
    rows: dict[int, list[str]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            rows[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    second, below = os.sysconf("SC_CLK_TCK"), [os.getpid() if root is None else root]
    for parent in below:  # grows
        below += [pid for pid, row in rows.items() if int(row[_PARENT]) == parent]
    return {pid: [int(ticks) / second for ticks in rows[pid][_TIMES]] for pid in below}
