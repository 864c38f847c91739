"""The workloads, and `Batches`, which plans one with the engine's scheduler, runs its batches on a
backend and collects the rows; also load for seconds."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from baselines import LABELS
from clock import on_device
from report import Row
from scenarios import Request, Workload
from torch.nn import functional

from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.engine.jobs import ScheduledChunk, build_batch
from gpuscore.engine.plan import plan_items
from gpuscore.engine.scheduler import Scheduler
from gpuscore.types.batch import Float64Array, PackedBatch, RowScores
from gpuscore.types.request import ScoreRequest

SENSORS = (
    *("nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu"),
    *("--format=csv,noheader", "--id=0"),
)
HOLD = 0.1  # seconds, more than launching takes
QUEUED = 2  # of a launcher, which has buffers for two batches
WORKLOADS: Mapping[str, Workload] = {
    "a": Workload(2000, 500, 20),
    "a cached": Workload(2000, 500, 20, cached=2000),
    "b cached": Workload(1910, 500, 10, cached=1900),
    "d": Workload(120, 10, 180),
    "300": Workload(280, 1, 20),
}
TRIAL: Mapping[str, Workload] = {
    "a": Workload(200, 25, 20),
    "a cached": Workload(200, 25, 20, cached=200),
    "b cached": Workload(191, 25, 10, cached=190),
    "d": Workload(12, 3, 20),
    "300": Workload(28, 1, 20),
}
PlannedBatches = list[tuple[list[ScheduledChunk], PackedBatch]]
Launch = Callable[[], Callable[[], object]]  # queues work and returns what waits for it


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
        batches = self.planned(request)
        table = np.full((len(request[1]), len(LABELS)), np.nan)
        for (chunks, _), scores in zip(batches, self._collected(batches), strict=True):
            items = [item for chunk in chunks for item in chunk.scored_items]
            if items:
                assert scores.lse is not None
                logits = scores.label_logits.reshape(len(items), len(LABELS)).astype(np.float64)
                table[items] = logits - scores.lse[:, None]
        return table

    def seconds(self, request: Request) -> float:
        """Measure the batches' time on the device (`on_device`), without fetching results."""
        batches = self.planned(request)
        finish: list[Callable[[], RowScores]] = []
        launch = self.backend.launcher.launch
        seconds = on_device(
            lambda: finish.extend(launch(batch) for _, batch in batches), self.backend.device, HOLD
        )
        for wait in finish:
            wait()
        return seconds

    def planned(self, request: Request) -> PlannedBatches:
        """Return the request's batches, after running the request that must be cached before."""
        scheduler = Scheduler(self.backend.limits)
        if (before := first_of(request, self.workload)) is not None:
            batches = all_batches(scheduler, before)
            self._collected(batches)
            for chunks, _ in batches:
                scheduler.succeeded(chunks)
        already = scheduler.cached_tokens
        batches = all_batches(scheduler, request)
        self.cached_tokens = scheduler.cached_tokens - already
        return batches

    def _collected(self, batches: PlannedBatches) -> list[RowScores]:
        pending = [self.backend.extend(batch) for _, batch in batches]
        return [self.backend.collect(batch) for batch in pending]


def all_batches(scheduler: Scheduler, request: Request) -> PlannedBatches:
    """Add a request, and return its batches, each with its chunks."""
    job = scheduler.add(plan_items(score_request(*request), scheduler.limits))
    batches = []
    while chunks := scheduler.schedule():
        batches.append((chunks, build_batch(chunks, scheduler.limits)))
    if not job.fully_scheduled:
        raise RuntimeError("the scheduler did not hand out all of a request")
    return batches


def score_request(query: Sequence[int], items: Sequence[Sequence[int]]) -> ScoreRequest:
    labels = (np.array(LABELS, np.int32),) * len(items)
    arrays = tuple(np.array(item, np.int32) for item in items)
    return ScoreRequest(np.array(query, np.int32), arrays, labels, need_lse=True)


# ---- load ----


def product(size: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Return what queues a product of square matrices."""
    x, w = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))

    def launch() -> Callable[[], object]:
        functional.linear(x, w)
        if device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return launch


def launched(backend: TorchBackend, workload: Workload) -> Launch:
    """Return what queues one request's batches, the same ones every time, packed beforehand."""
    request = next(workload.draws(backend.limits.vocab_rows, seed=5000))
    batches = Batches(backend, workload).planned(request)

    def launch() -> Callable[[], object]:
        waits = [backend.launcher.launch(batch) for _, batch in batches]
        return lambda: [wait() for wait in waits]

    return launch


def sustained(launch: Launch, seconds: float, on_cuda: bool) -> Row:
    """Keep a device busy for some seconds.

    Args:
        launch: `QUEUED` are under way at a time.
        seconds: how long the load lasts. The first third, while the clock settles, is left out.
        on_cuda: ask for the card's clock, power and temperature meanwhile.

    Returns:
        Milliseconds of each launch's work, and what the card's sensors said.
    """
    waits = [launch() for _ in range(QUEUED)]
    start = counted = time.perf_counter()
    done = 0
    sensors = None
    while (now := time.perf_counter()) < start + seconds or (sensors and sensors.poll() is None):
        if counted == start and now > start + seconds / 3:
            sensors = subprocess.Popen(SENSORS, stdout=subprocess.PIPE) if on_cuda else None
            counted, done = now, 0
        waits.pop(0)()
        waits.append(launch())
        done += 1
    row: Row = {"ms": 1e3 * (time.perf_counter() - counted) / done, "launches": done}
    for wait in waits:
        wait()
    if sensors is not None:
        row["sensors"] = sensors.communicate()[0].decode().strip()
    return row
