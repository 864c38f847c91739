"""Rows of the table: each workload on one backend, in the engine, and with transformers.

Every row's results are compared with the reference before it is timed.
"""

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import baselines
import numpy as np
import torch
from clock import Taken
from gpu_reference import Reference
from gpu_work import LABELS, Batches, Draws, Goal, first_of
from in_time import seconds_left
from report import Row
from scenarios import Request
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.config import EngineConfig, RequestLimits
from gpuscore.engine.engine import Engine
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import label_logprobs

Floors: TypeAlias = dict[str, dict[str, float]]  # by workload

IN_FLIGHT = 4
WHOLE_TOKENS = 200_000  # larger workloads are timed on a sample with padded batches
SAMPLE = 64  # items of the sample
PROFILED = 25  # kernels


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
    """Measures rows; holds the data that all rows share."""

    goals: tuple[Goal, ...]
    reference: Reference
    floors: Floors
    effort: Effort
    add: Callable[[Row], None]  # keeps a row

    def each(self, scorer: str, make: Callable[[Goal], Row]) -> None:
        """Add one row per workload; if one workload fails, the others are still measured."""
        for goal in self.goals:
            row = {"scorer": scorer, "workload": goal.name, "sizes": str(goal.workload)}
            try:
                if seconds_left() <= 0:
                    raise TimeoutError("the section's time is up")
                row |= make(goal)
            except Exception as error:  # noqa: BLE001  (is reported with the row, and fails the run)
                row["failed"] = f"{type(error).__name__}: {error}"
            self.add(row)

    def of_floor(self, goal: Goal, milliseconds: float) -> float | None:
        floor = self.floors.get(goal.name)
        return None if floor is None else round(floor["ms"] / milliseconds, 3)

    # ---- one backend ----

    def backend(self, scorer: str, backend: TorchBackend, judged: bool, slack: float = 1.0) -> None:
        self.each(scorer, partial(self._on_backend, backend, judged, slack))

    def _on_backend(self, backend: TorchBackend, judged: bool, slack: float, goal: Goal) -> Row:
        batches = Batches(backend, goal.workload)
        row = self._checked(goal, batches.score, slack)
        if "wrong" in row:
            return row
        draws = Draws(goal.workload, self.reference.vocab, seed=2000)
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
        row |= {"all wall ms": walls, "items/s": 1e3 * goal.workload.num_items / best}
        row["of floor"] = self.of_floor(goal, best)
        if judged and goal.share is not None:
            met = row["of floor"] is not None and row["of floor"] >= goal.share
            row |= {"goal": f">= {goal.share:.0%} of the floor", "met": met}
        return row

    def _checked(
        self, goal: Goal, score: Callable[[Request], Float64Array], slack: float = 1.0
    ) -> Row:
        results = [score(r) for r in self.reference.inputs(goal)]
        verdict = self.reference.verdict(goal, results, slack)
        return {"errors": str(verdict)} | ({} if verdict.right else {"wrong": True})

    # ---- the engine ----

    def engine(self, backend: TorchBackend) -> None:
        """Measure from lists of ids to log-probabilities, as `Scorer` does; closes the backend."""
        engine = Engine(backend, EngineConfig())
        builder = PromptBuilder(None, backend.limits, UNLIMITED)
        try:
            self.each("engine", partial(self._in_engine, engine, builder))
        finally:
            engine.close()

    def _in_engine(self, engine: Engine, builder: PromptBuilder, goal: Goal) -> Row:
        draws = Draws(goal.workload, self.reference.vocab, seed=3000)

        def score(request: Request) -> Float64Array:
            built = builder.build(ScoreInput(*request, label_token_ids=LABELS))
            assert built is not None
            return np.stack(label_logprobs(engine.score(built).result()))

        def prepared() -> Request:
            request = draws.next()
            if (before := first_of(request, goal.workload)) is not None:
                score(before)
            return request

        def one_alone() -> float:
            request = prepared()
            start = time.perf_counter()
            score(request)
            return 1e3 * (time.perf_counter() - start)

        def some_at_once() -> float:
            requests = [prepared() for _ in range(IN_FLIGHT * 2)]
            start = time.perf_counter()
            list(pool.map(score, requests))
            return (time.perf_counter() - start) / len(requests)

        def first_cached(request: Request) -> Float64Array:
            if (before := first_of(request, goal.workload)) is not None:
                score(before)
            return score(request)

        row = self._checked(goal, first_cached)
        if "wrong" in row:
            return row
        before = engine.stats().counters.cached_tokens
        alone = self.effort.times(one_alone)
        row["cached"] = (engine.stats().counters.cached_tokens - before) / len(alone)
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            together = statistics.median(self.effort.times(some_at_once))
        row["wall ms"] = wall = statistics.median(alone)
        row |= {
            "all wall ms": alone,
            "items/s": goal.workload.num_items / wall * 1e3,
            f"items/s, {IN_FLIGHT} in flight": goal.workload.num_items / together,
            "of floor": self.of_floor(goal, wall),
        }
        if goal.engine_ms is not None:
            row |= {"goal": f"<= {goal.engine_ms} ms", "met": wall <= goal.engine_ms}
        return row

    # ---- transformers ----

    def transformers(self, model: PreTrainedModel) -> None:
        cold = [goal for goal in self.goals if not goal.workload.cached]
        others = Rows(tuple(cold), self.reference, self.floors, self.effort, self.add)
        for name, run in (
            ("transformers, padded batches", baselines.padded_batches),
            ("transformers, query KV reused", baselines.reused_query),
        ):
            others.each(name, partial(others._by_transformers, model, run))

    def _by_transformers(
        self, model: PreTrainedModel, run: Callable[..., Float64Array], goal: Goal
    ) -> Row:
        workload, most = goal.workload, goal.workload.num_items
        whole = run is baselines.padded_batches
        prompt = workload.query_len + workload.item_len
        if whole and most * prompt > WHOLE_TOKENS:
            most = min(most, SAMPLE)
        row = self._checked(goal, lambda request: run(model, request[0], request[1][:most]))
        if "wrong" in row:
            return row
        draws = Draws(workload, self.reference.vocab, seed=4000)

        def timed() -> float:
            query, items = draws.next()
            start = time.perf_counter()
            run(model, query, items[:most])  # returns results on the host, so it waits
            return 1e3 * (time.perf_counter() - start)

        timed()
        times = self.effort.times(timed)
        wall = statistics.median(times) * workload.num_items / most
        if most < workload.num_items:
            row["sample"] = f"{most} of {workload.num_items} items, extrapolated"
        return row | {
            "wall ms": wall,
            "all wall ms": times,
            "items/s": workload.num_items / wall * 1e3,
            "of floor": self.of_floor(goal, wall),
        }


UNLIMITED = RequestLimits(max_items=1 << 30, max_labels=1 << 30, max_request_tokens=1 << 30)


def profiled(backend: TorchBackend, goal: Goal) -> list[Row]:
    """Return the kernels that take most of one request's time; on a CPU, torch's operators.

    Raises:
        RuntimeError: the profiler saw no kernels.
    """
    batches = Batches(backend, goal.workload)
    works = batches.packed(Draws(goal.workload, backend.limits.vocab_rows, seed=6000).next())
    on_cuda = backend.device.type == "cuda"

    def run() -> None:
        for wait in [backend.launcher.launch(work.batch) for work in works]:
            wait()

    run()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities, acc_events=True) as profiled:
        run()
    rows: list[Row] = []
    for event in profiled.key_averages():
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
