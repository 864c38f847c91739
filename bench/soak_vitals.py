"""The soak's measurements of processes, and its test for growth of memory."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20
BLOCKS = 10
ALLOWED = 1.0  # MiB per hour
WARM = 60.0  # first seconds of a process, which do not count because caches and heaps fill


@dataclass(frozen=True)
class Process:
    """Measurements of one process at one time.

    Args:
        pid: its process id.
        rss: resident memory in bytes.
        descriptors: open file descriptors.
        threads: number of threads.
    """

    pid: int
    rss: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """All measurements at one time, in seconds since the start of the load.

    Requests, latencies (seconds) and hit rate count from the sample before.
    """

    time: float
    server: Process
    engine: Process | None  # None while it is started again
    requests: int
    p50: float
    p99: float
    hit_rate: float


def look(pid: int) -> Process | None:
    """Measure a process; None if it has ended."""
    process = Path(f"/proc/{pid}")
    try:
        rss = int((process / "statm").read_text().split()[1]) * PAGE
        threads = int((process / "stat").read_text().rsplit(")", 1)[1].split()[17])
        return Process(pid, rss, len(os.listdir(process / "fd")), threads)
    except (OSError, IndexError):
        return None


def engine_of(pid: int) -> int | None:
    """Return the process id of the engine, the server's only child; None if there is none."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in lists for child in path.read_text().split()]
    return children[0] if children else None


def counters(metrics: str) -> tuple[float, float]:
    """Return prompt tokens found in the prefix cache, and all prompt tokens, so far."""
    return _metric(metrics, "prefix_cache_tokens_total"), _metric(metrics, "prompt_tokens_total")


def _metric(metrics: str, name: str) -> float:
    """Return the sum over all models and replicas; 0 before the first one is loaded."""
    values = re.findall(rf"^gpuscore_{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, values))


@dataclass(frozen=True)
class Slope:
    """Growth of memory with its standard error, in MiB per hour."""

    value: float
    error: float

    @property
    def within_noise(self) -> bool:
        return self.value <= max(2 * self.error, ALLOWED)

    def __str__(self) -> str:
        return f"{self.value:+.2f} +- {self.error:.2f} MiB/h"


def slope(points: Sequence[tuple[int, float, int]]) -> Slope | None:
    """Fit (process id, seconds, bytes) by least squares: one slope, and a level for each process.

    Consecutive samples are not independent, so each process's samples are averaged in blocks, about
    ten in all, and the error is computed from the blocks. None if there are too few blocks.
    """
    times, values, levels = _blocks(points)
    free = len(times) - len(set(levels)) - 1
    if free < 2:
        return None
    design = np.array([[t, *(float(level == level_of) for level_of in sorted(set(levels)))]
                       for t, level in zip(times, levels, strict=True)])  # fmt: skip
    solution, *_ = np.linalg.lstsq(design, np.array(values), rcond=None)
    residual = np.array(values) - design @ solution
    variance = float(residual @ residual) / free * np.linalg.inv(design.T @ design)[0, 0]
    return Slope(float(solution[0]), float(np.sqrt(variance)))


def _blocks(
    points: Sequence[tuple[int, float, int]],
) -> tuple[list[float], list[float], list[int]]:
    """Average the points in blocks; return the blocks' hours, MiB and process ids."""
    lives = {pid: [point for point in points if point[0] == pid] for pid, *_ in points}
    size = max(1, len(points) // BLOCKS)
    times, values, levels = [], [], []
    for pid, life in lives.items():
        for part in np.array_split(np.array(life, dtype=float), max(1, round(len(life) / size))):
            times.append(float(part[:, 1].mean()) / 3600)
            values.append(float(part[:, 2].mean()) / MIB)
            levels.append(pid)
    return times, values, levels


def growth(samples: Sequence[Sample], which: str) -> Slope | None:
    """Return the growth of "server" or "engine" in the second half of the time.

    The first minute of each process does not count.
    """
    born: dict[int, float] = {}
    points = []
    half = samples[-1].time / 2
    for sample in samples:
        process: Process | None = getattr(sample, which)
        if process is None:
            continue
        since = born.setdefault(process.pid, sample.time)
        if sample.time >= half and sample.time - since >= min(WARM, half):
            points.append((process.pid, sample.time, process.rss))
    return slope(points)
