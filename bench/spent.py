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
    """Wall time and CPU time of one run, in seconds.

    Args:
        wall: seconds by the clock.
        cpu: seconds of all threads of this process and its descendants together, user and system.
        others: CPU time of this machine's other programs meanwhile.
    """

    wall: float
    cpu: float
    others: float = 0.0


def spent(run: Callable[[], object]) -> Spent:
    cpu, busy, start = cpu_seconds(), _busy_seconds(), time.perf_counter()
    run()
    wall, used = time.perf_counter() - start, cpu_seconds() - cpu
    return Spent(wall, used, _busy_seconds() - busy - used)


def cpu_seconds() -> float:
    """Return the CPU-seconds of this process and its descendants so far, the latter's to 10 ms.

    vLLM computes in a process that goes on, so the times of children that have ended do not do.
    """
    others = {pid: sum(times) for pid, times in family().items() if pid != os.getpid()}
    return sum(os.times()[:4]) + sum(others.values())


def _busy_seconds() -> float:
    """Return the CPU-seconds of all processes of this machine so far: user, nice and system."""
    ticks = Path("/proc/stat").read_text().split()[1:4]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


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
