"""The workloads, and `Batches`, which plans one with the engine's scheduler, runs its batches on a
backend and collects the rows."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from clock import Taken, on_device
from scenarios import Request, Workload

from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.engine.jobs import Work
from gpuscore.engine.plan import plan_items
from gpuscore.engine.scheduler import Scheduler
from gpuscore.types.batch import Float64Array, RowScores
from gpuscore.types.request import ScoreRequest

LABELS = [11, 23]
WORKLOADS: Mapping[str, Workload] = {
    "a": Workload(2000, 500, 20),
    "a cached": Workload(2000, 500, 20, cached=2000),
    "b cached": Workload(1910, 500, 10, cached=1900),
    "d": Workload(120, 10, 180),
    "300": Workload(280, 1, 20),
}


def workloads(trial: bool) -> Mapping[str, Workload]:
    """Return all workloads; in a trial, of about a tenth of the size."""
    return {name: _smaller(each) for name, each in WORKLOADS.items()} if trial else WORKLOADS


def _smaller(workload: Workload) -> Workload:
    return replace(
        workload,
        query_len=workload.query_len // 10,
        cached=workload.cached // 10,
        num_items=max(min(3, workload.num_items), workload.num_items // 20),
        item_len=min(workload.item_len, 20),
    )


class Draws:
    """Requests of random tokens, a different one each time."""

    def __init__(self, workload: Workload, vocab: int, seed: int) -> None:
        self.workload, self.vocab, self._seed = workload, vocab, seed

    def next(self) -> Request:
        self._seed += 1
        return replace(self.workload, seed=self._seed).draw(self.vocab)


def score_request(query: Sequence[int], items: Sequence[Sequence[int]]) -> ScoreRequest:
    labels = (np.array(LABELS, np.int32),) * len(items)
    arrays = tuple(np.array(item, np.int32) for item in items)
    return ScoreRequest(np.array(query, np.int32), arrays, labels, need_lse=True)


def first_of(request: Request, workload: Workload) -> Request | None:
    """Return the request to run first so that the cached part of the query is cached, or None."""
    query = request[0][: workload.cached]
    return (query, [[0]]) if query else None


class Batches:
    """Runs requests on one backend as the engine does, but with a clock around the device only."""

    def __init__(self, backend: TorchBackend, workload: Workload) -> None:
        self.backend, self.workload = backend, workload
        self.cached_tokens = 0  # query tokens that the last request found in the cache

    def score(self, request: Request) -> Float64Array:
        """Return label log-probabilities [N, labels]."""
        works = self.planned(request)
        return _rows(works, self._collected(works), len(request[1]))

    def wall(self, request: Request) -> float:
        """Measure the seconds from packed batches to their RowScores."""
        works = self.planned(request)
        start = time.perf_counter()
        self._collected(works)
        return time.perf_counter() - start

    def device(self, request: Request, hold: float) -> Taken:
        """Measure the batches' time on the device (`on_device`), without fetching results."""
        works = self.planned(request)
        finish: list[Callable[[], RowScores]] = []
        launch = self.backend.launcher.launch
        taken = on_device(
            lambda: finish.extend(launch(work.batch) for work in works), self.backend.device, hold
        )
        for wait in finish:
            wait()
        return taken

    def planned(self, request: Request) -> list[Work]:
        """Return the request's batches, after running the request that must be cached before."""
        scheduler = Scheduler(self.backend.limits)
        if (before := first_of(request, self.workload)) is not None:
            works = all_batches(scheduler, before)
            self._collected(works)
            for work in works:
                scheduler.succeeded(work)
        already = scheduler.cached_tokens
        works = all_batches(scheduler, request)
        self.cached_tokens = scheduler.cached_tokens - already
        return works

    def _collected(self, works: list[Work]) -> list[RowScores]:
        pending = [self.backend.extend(work.batch) for work in works]
        return [self.backend.collect(batch) for batch in pending]


def all_batches(scheduler: Scheduler, request: Request) -> list[Work]:
    """Add a request, and return its batches."""
    job = scheduler.add(plan_items(score_request(*request), scheduler.limits))
    works = []
    while (work := scheduler.next_batch()) is not None:
        works.append(work)
    if not job.exhausted:
        raise RuntimeError("the scheduler did not hand out all of a request")
    return works


def _rows(works: list[Work], scores: list[RowScores], count: int) -> Float64Array:
    """Collect label log-probabilities in the order of the items."""
    table = np.full((count, len(LABELS)), np.nan)
    for work, row_scores in zip(works, scores, strict=True):
        items = [item for share in work.shares for item in share.scored]
        if items:
            assert row_scores.lse is not None
            logits = row_scores.label_logits.reshape(len(items), len(LABELS)).astype(np.float64)
            table[items] = logits - row_scores.lse[:, None]
    return table
