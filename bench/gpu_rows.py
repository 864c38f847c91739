"""Rows of the table: each workload on one backend and in the engine, and under load for seconds.

Every row's results are compared with the reference before it is timed.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from clock import Taken
from gpu_reference import Reference
from gpu_work import LABELS, Batches, Draws, first_of
from in_time import seconds_left
from report import Row
from scenarios import Request, Workload
from sensors import Sampler
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.config import RequestLimits
from gpuscore.engine.engine import Engine
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.request import ScoreRequest
from gpuscore.types.results import label_logprobs

Floors: TypeAlias = Mapping[str, Mapping[str, Any]]  # by workload

IN_FLIGHT = 4  # requests in the engine
QUEUED = 2  # of a launcher, which has buffers for two batches
PROFILED = 25  # kernels
UNLIMITED = RequestLimits(max_items=1 << 30, max_labels=1 << 30, max_request_tokens=1 << 30)


@dataclass(frozen=True)
class Effort:
    """Number of repetitions of each measurement: `repeat`, but fewer if they take long."""

    repeat: int = 15
    least: int = 3
    seconds: float = 4.0  # after this time only `least` repetitions are made

    def times(self, take: Callable[[], Any]) -> list[Any]:
        times_taken: list[Any] = []
        end = time.perf_counter() + min(self.seconds, seconds_left())
        while len(times_taken) < self.repeat and (
            len(times_taken) < self.least or time.perf_counter() < end
        ):
            times_taken.append(take())
        return times_taken


@dataclass
class Rows:
    """Measures rows; holds the data that all rows share.

    Args:
        workloads: to measure, by name.
        reference: judges results.
        floors: of the workloads, where they are known.
        effort: repetitions.
        add: keeps a row.
    """

    workloads: Mapping[str, Workload]
    reference: Reference
    floors: Floors
    effort: Effort
    add: Callable[[Row], None]

    def each(self, scorer: str, make: Callable[[str, Workload], Row]) -> None:
        """Add one row per workload; if one workload fails, the others are still measured."""
        for name, workload in self.workloads.items():
            row = {"scorer": scorer, "workload": name, "sizes": str(workload)}
            try:
                if seconds_left() <= 0:
                    raise TimeoutError("the stage's time is up")
                row |= make(name, workload)
            except Exception as error:  # noqa: BLE001  (is reported with the row, and fails the run)
                row["failed"] = f"{type(error).__name__}: {error}"
            self.add(row)

    def of_floor(self, name: str, milliseconds: float) -> float | None:
        floor = self.floors.get(name)
        return None if floor is None else round(floor["ms"] / milliseconds, 3)

    def backend(self, scorer: str, backend: TorchBackend) -> None:
        self.each(scorer, partial(self._on_backend, backend))

    def _on_backend(self, backend: TorchBackend, name: str, workload: Workload) -> Row:
        batches = Batches(backend, workload)
        row = self._checked(name, workload, batches.score)
        if "wrong" in row:
            return row
        draws = Draws(workload, self.reference.vocab, seed=2000)
        walls = [1e3 * batches.wall(draws.next()) for _ in range(2)]  # the first warms up
        hold = min(0.1, 2 * walls[1] / 1e3 + 0.01)  # at least the time that launching takes
        walls = self.effort.times(lambda: 1e3 * batches.wall(draws.next()))
        row |= {"wall ms": statistics.median(walls), "cached": batches.cached_tokens}
        best = row["wall ms"]
        if backend.device.type == "cuda":
            taken: list[Taken] = self.effort.times(lambda: batches.device(draws.next(), hold))
            devices = [1e3 * batch_time.seconds for batch_time in taken]
            best = row["device ms"] = statistics.median(devices)
            row |= {
                "all device ms": devices,
                # Below 1, some times include gaps between launches.
                "host ahead": sum(batch_time.ahead for batch_time in taken) / len(taken),
            }
        row |= {"all wall ms": walls, "items/s": 1e3 * workload.num_items / best}
        return row | {"of floor": self.of_floor(name, best)}

    def _checked(
        self, name: str, workload: Workload, score: Callable[[Request], Float64Array]
    ) -> Row:
        results = [score(request) for request in self.reference.inputs(workload)]
        verdict = self.reference.verdict(name, results)
        return {"errors": str(verdict)} | ({} if verdict.right else {"wrong": True})

    def engine(self, scorer: str, backend: TorchBackend) -> None:
        """Measure from lists of ids to log-probabilities, as `Scorer` does; closes the backend.

        With several in flight requests are built before, because a server's engine gets them built:
        in one process, building them holds the lock that the engine's thread needs.
        """
        engine = Engine(backend)
        builder = PromptBuilder(None, backend.limits, UNLIMITED)
        try:
            self.each(scorer, partial(self._in_engine, engine, builder))
        finally:
            engine.close()

    def _in_engine(
        self, engine: Engine, builder: PromptBuilder, name: str, workload: Workload
    ) -> Row:
        draws = Draws(workload, self.reference.vocab, seed=3000)

        def built(request: Request) -> ScoreRequest:
            made = builder.build(ScoreInput(*request, label_token_ids=LABELS))
            assert made is not None
            return made

        def score(request: Request) -> Float64Array:
            return np.stack(label_logprobs(engine.score(built(request)).result()))

        def prepared() -> Request:
            request = draws.next()
            if (before := first_of(request, workload)) is not None:
                score(before)
            return request

        def one_alone() -> float:
            request = prepared()
            start = time.perf_counter()
            score(request)
            return 1e3 * (time.perf_counter() - start)

        def some_at_once() -> float:
            requests = [built(prepared()) for _ in range(IN_FLIGHT * 2)]
            start = time.perf_counter()
            list(pool.map(lambda request: engine.score(request).result(), requests))
            return (time.perf_counter() - start) / len(requests)

        def first_cached(request: Request) -> Float64Array:
            if (before := first_of(request, workload)) is not None:
                score(before)
            return score(request)

        row = self._checked(name, workload, first_cached)
        if "wrong" in row:
            return row
        before = engine.stats().counters.cached_tokens
        alone = self.effort.times(one_alone)
        row["cached"] = (engine.stats().counters.cached_tokens - before) / len(alone)
        sampler = Sampler() if torch.cuda.is_available() else None
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            together = statistics.median(self.effort.times(some_at_once))
        row |= sampler.stop() if sampler is not None else {}  # times compare at one clock only
        row["wall ms"] = wall = statistics.median(alone)
        return row | {
            "all wall ms": alone,
            "items/s": workload.num_items / wall * 1e3,
            f"items/s, {IN_FLIGHT} in flight": workload.num_items / together,
            "of floor": self.of_floor(name, wall),
        }


def sustained(launch: Callable[[], Callable[[], object]], seconds: float, on_cuda: bool) -> Row:
    """Keep a device busy for some seconds and sample its clock, power and temperature.

    Args:
        launch: queues work and returns what waits for it; `QUEUED` are under way at a time.
        seconds: of load. Times and samples of the first third, while the clock settles, are left
            out.
        on_cuda: the card has sensors.

    Returns:
        Milliseconds of each launch's work, and what the card's sensors said.
    """
    waits = [launch() for _ in range(QUEUED)]
    start = counted = time.perf_counter()
    done, sampler = 0, None
    while (now := time.perf_counter()) < start + seconds:
        if counted == start and now > start + seconds / 3:
            sampler, counted, done = Sampler() if on_cuda else None, now, 0
        waits.pop(0)()
        waits.append(launch())
        done += 1
    took = time.perf_counter() - counted
    row = {"ms": 1e3 * took / done, "launches": done}
    row |= sampler.stop() if sampler is not None else {}
    for wait in waits:
        wait()
    return row


def launched(backend: TorchBackend, workload: Workload) -> Callable[[], Callable[[], object]]:
    """Return what queues one request's batches, the same ones every time, packed beforehand."""
    batches = Batches(backend, workload)
    works = batches.planned(Draws(workload, backend.limits.vocab_rows, seed=5000).next())

    def launch() -> Callable[[], object]:
        waits = [backend.launcher.launch(work.batch) for work in works]
        return lambda: [wait() for wait in waits]

    return launch


def profiled(backend: TorchBackend, workload: Workload) -> list[Row]:
    """Return the kernels that take most of one request's time; on a CPU, torch's operators.

    Raises:
        RuntimeError: the profiler saw no kernels.
    """
    run = launched(backend, workload)
    run()()
    on_cuda = backend.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities, acc_events=True) as recorded:
        run()()
    rows: list[Row] = []
    for event in recorded.key_averages():
        # An operator's time includes its kernels, which are events of their own: count only one.
        if (event.device_type == DeviceType.CUDA) == on_cuda:
            spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            rows.append({"ms": spent / 1e3, "calls": event.count, "name": event.key})
    total = sum(row["ms"] for row in rows)
    if not total:
        raise RuntimeError("torch's profiler saw no kernels on this machine")
    rows.sort(key=lambda row: -row["ms"])
    return [row | {"share": round(row["ms"] / total, 4)} for row in rows[:PROFILED]]


def release() -> None:
    """Return freed memory to the CUDA device."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
