"""The engine's simulated worlds over the product's own backend: traffic, cancellations, deadlines,
pages that run out, memory that runs out, a lost device.

A world comes from its seed, and so do the turns of the threads. Worlds of one group share a
backend, as requests of a server do, so a finding is repeated by running its group.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from gpuscore.backends.base import DeviceLost
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.engine.runner import Runner
from gpuscore.engine.ticket import Ticket
from gpuscore.errors import Unavailable
from gpuscore.types.batch import PackedBatch, RowScores
from support.simulation import World
from support.streams.checker import Counts, Finding
from support.streams.model import write_model
from support.streams.recorder import Faults, Recorder
from support.streams.runner import device_of, make_backend, setup_of
from support.streams.turns import Turns

GROUP = 10  # worlds that share a backend
FAULTS = {
    "memory": 0.08,  # an allocation of the batch finds no memory
    "crash": 0.03,  # the batch is refused on the backend's thread
    "nan": 0.04,
    "pages": 0.1,
    "slow": 0.05,
    "lost": 0.02,  # a call finds that the device is gone
}
SOON = 60  # allocations or calls until an error that is due happens, at most
LOGGERS = ("gpuscore.engine.runner", "gpuscore.backends.torch.backend")


class DeviceFaults(Faults):
    """Errors that a world makes happen after some more allocations or calls."""

    def __init__(self) -> None:
        self.memory_in: int | None = None
        self.lost_in: int | None = None

    def at_allocation(self) -> None:
        if self.memory_in is not None:
            self.memory_in -= 1
            if self.memory_in < 0:
                self.memory_in = None
                raise torch.OutOfMemoryError("CUDA out of memory: simulated")

    def at_call(self) -> None:
        if self.lost_in is not None:
            self.lost_in -= 1
            self.lost = self.lost or self.lost_in < 0
        if self.lost:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure (simulated)")


class BackendWithFaults:
    """The product's backend, in a world that lets some of its batches fail."""

    def __init__(self, real: TorchBackend, device: DeviceFaults, world: "StreamWorld") -> None:
        self.real, self.device, self.world = real, device, world
        self.limits = real.limits
        self.layers_done = 0
        self.poison: set[int] = set()
        self.seen_faults: set[str] = set()

    def strikes(self, fault: str) -> bool:
        if self.world.rng.random() < self.world.faults.get(fault, 0):
            self.seen_faults.add(fault)
            return True
        return False

    def extend(self, batch: PackedBatch) -> Any:
        if self.strikes("memory"):
            self.device.memory_in = int(self.world.rng.integers(SOON))
        if self.strikes("lost"):
            self.device.lost_in = int(self.world.rng.integers(SOON))
        if self.strikes("crash"):
            batch = replace(batch, token_ids=batch.token_ids + 10**6)
        return self.real.extend(batch)

    def collect(self, pending: Any) -> RowScores:
        scores = self.real.collect(pending)
        if len(scores.label_logits) and self.strikes("nan"):
            scores.label_logits[-1] = np.nan
        return scores


@dataclass
class StreamWorld(World):
    """A world over a loaded backend, whose launches compute nothing."""

    real: TorchBackend | None = None
    device: DeviceFaults = field(default_factory=DeviceFaults)
    events: ClassVar = (20, 60)

    def make_backend(self) -> BackendWithFaults:
        assert self.real is not None
        return BackendWithFaults(self.real, self.device, self)

    def make_runner(self, *, prefix_cache: bool) -> Runner:
        return Runner(self.backend, lambda: self.now, prefix_cache=prefix_cache)

    def event(self) -> None:
        if not self.device.lost:
            super().event()

    def step(self) -> None:
        try:
            super().step()
        except DeviceLost:  # ends the engine's loop, which answers what is left
            self.runner.fail_all(Unavailable("the device is lost", retry_after=1))

    def check_pages(self) -> None:
        if not self.device.lost:  # then the process ends, and its pages with it
            super().check_pages()

    def check(self, ticket: Ticket) -> None:
        result = self.result_of(ticket)
        if result is None:
            return
        for logits, labels in zip(result.label_logits, ticket.request.row_labels, strict=True):
            assert len(logits) == len(labels)
            assert np.isfinite(logits).all()


@dataclass
class Report:
    """Findings of some worlds, and amounts of what they did."""

    findings: dict[tuple[str, ...], tuple[int, Finding]] = field(default_factory=dict)  # and seed
    counts: Counts = field(default_factory=Counts)
    at_start: int = 0  # operations, which `counts` leaves out
    worlds: int = 0
    batches: Counter[str] = field(default_factory=Counter)  # replayed, launched, failed ones
    streams: set[str] = field(default_factory=set)
    changes: int = 0  # of thread

    def add(self, other: "Report") -> None:
        self.findings = other.findings | self.findings
        self.counts.add(other.counts)
        self.at_start += other.at_start
        self.worlds += other.worlds
        self.batches += other.batches
        self.streams |= other.streams
        self.changes += other.changes


class Life:
    """One backend from its start to its end, and the worlds that it serves."""

    def __init__(self, directory: Path, group: int) -> None:
        self.faults = DeviceFaults()
        self.recorder = Recorder(Turns(group))
        self.recorder.faults = self.faults
        self.report = Report()
        self.setup = setup_of(group)
        self.directory = directory

    @contextmanager
    def started(self) -> Iterator[TorchBackend]:
        with device_of(self.recorder):
            real = make_backend(self.directory, self.setup)
            self.report.at_start = self.recorder.checker.counts.operations
            self.recorder.checker.counts = Counts()
            try:
                yield real
            finally:
                real.close()
                self._close(real)
                self.recorder.closed = True

    def run(self, seed: int, real: TorchBackend) -> StreamWorld:
        kinds = sorted(FAULTS)
        chosen = [[], [kinds[seed // 3 % len(kinds)]], kinds][seed % 3]
        self.recorder.turns.rng = np.random.default_rng(seed)
        faults = {kind: FAULTS[kind] for kind in chosen}
        world = StreamWorld(seed, faults, real=real, device=self.faults)
        world.run()
        self.report.worlds += 1
        self.report.batches.update(world.backend.seen_faults)
        self._note(seed)
        self.faults.memory_in = self.faults.lost_in = None
        return world

    def kinds(self) -> set[str]:
        """Return the kinds of all findings so far."""
        return {finding.kind for finding in self.recorder.checker.findings.values()}

    def _note(self, seed: int) -> None:
        for key, finding in self.recorder.checker.findings.items():
            self.report.findings.setdefault(key, (seed, finding))

    def _close(self, real: TorchBackend) -> None:
        if isinstance(real.launcher, GraphLauncher):
            self.report.batches["replayed"] += real.launcher.replayed
            self.report.batches["launched"] += real.launcher.launched
        self.report.counts.add(self.recorder.checker.counts)
        self.report.changes += self.recorder.turns.changes
        actors = self.recorder.checker.actors
        self.report.streams |= {name for name, is_stream in actors.items() if is_stream}
        self._note(-1)


def check_group(directory: Path, seeds: Sequence[int], group: int) -> Report:
    """Run worlds on one backend after the other: a lost device ends its process, and a new one
    starts."""
    report, left = Report(), list(seeds)
    while left:
        life = Life(directory, group)
        with life.started() as real:
            while left and not life.faults.lost:
                seed = left.pop(0)
                try:
                    life.run(seed, real)
                except Exception as error:
                    raise AssertionError(f"seed {seed} of group {group}: {error!r}") from error
        report.add(life.report)
    return report


def check_worlds(groups: Iterable[int]) -> Report:
    """Run all worlds of these groups; group g has the seeds from g * GROUP on."""
    report = Report()
    with silent(), tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder))
        for group in groups:
            seeds = range(group * GROUP, (group + 1) * GROUP)
            report.add(check_group(directory, seeds, group))
    return report


@contextmanager
def silent() -> Iterator[None]:
    """Silence the logs of simulated failures, and let torch use one thread."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
