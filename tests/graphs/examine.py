"""Starts a backend on a device that is not there, warms it up and runs batches."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from gpuscore.backends import plan_backend
from gpuscore.backends.common.batches import largest_batches
from gpuscore.backends.common.plan import MeasuredMemory
from gpuscore.backends.torch import backend as backend_module
from gpuscore.backends.torch import loader
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.decoder import shortened
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.config import ModelConfig
from gpuscore.types.batch import PackedBatch
from graphs.device import H200, device
from graphs.models import EmptyFiles, Model
from graphs.offsets import LIMIT, narrow_offsets
from graphs.recorder import Capture, Launch, Recorder
from graphs.triton_driver import TritonLog
from support.batches import in_one_batch, random_batch

LABELS = [9693, 2152]


@dataclass(slots=True)
class Examination:
    """Findings about one model.

    Attributes:
        counts: what a baseline holds; numbers and texts only.
        problems: what must not be.
        notes: what a reader should know.
    """

    model: str
    counts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Started:
    """A backend on the device, and what was measured while it started."""

    plan: TorchPlan
    backend: TorchBackend
    recorder: Recorder
    log: TritonLog
    weights: int  # bytes
    measured: MeasuredMemory
    graphs: int  # bytes that were counted for executables of graphs
    short_captures: list[Capture]


def examine(model: Model, *, quick: bool = False) -> Examination:
    """Start the model, warm it up, run batches; `quick` leaves out most of them."""
    examination = Examination(model.name)
    with tempfile.TemporaryDirectory() as folder, device(H200) as (recorder, log):
        with started(model, Path(folder), recorder, log) as start:
            start.recorder.heap.forget_peak()
            start.backend.warmup()
            log.frozen = True
            _count_captures(start, examination)
            _run_batches(start, examination, quick)
            _check_memory(start, examination)
        examination.counts["kernels compiled"] = len(log.compiled)
        if not log.remembered:
            examination.problems.append("no launch was made with code that the product remembered")
        _check_offsets(model, log, examination)
        examination.problems += recorder.problems
    return examination


@contextmanager
def started(model: Model, folder: Path, recorder: Recorder, log: TritonLog) -> Iterator[Started]:
    """Start the model's backend, whose thread records too."""
    directory = model.write(folder)
    marks: dict[str, Any] = {}

    def enter() -> None:
        recorder.__enter__()

    def noting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            marks[name] = run(*arguments, **options)
            marks[f"{name}: bytes"] = recorder.heap.asked
            return marks[name]

        return noted

    with ExitStack() as stack:
        for module, name, stand_in in (
            (loader, "CheckpointFiles", EmptyFiles),
            (loader, "fold", lambda part, tensor, norm: tensor.float()),
            (backend_module, "ThreadPoolExecutor", partial(ThreadPoolExecutor, initializer=enter)),
            (backend_module, "load_weights", noting("weights", backend_module.load_weights)),
            (backend_module, "measure", noting("measured", backend_module.measure)),
            (TorchBackend, "_graph_bytes", noting("graphs", TorchBackend._graph_bytes)),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        plan = plan_backend(directory, ModelConfig(str(directory), device="cuda", **model.settings))
        assert isinstance(plan, TorchPlan)
        plan = replace(plan, **model.plan)
        backend = TorchBackend(plan)
        stack.callback(backend.close)
        yield Started(
            plan,
            backend,
            recorder,
            log,
            marks["weights: bytes"],
            marks["measured"],
            marks["graphs"],
            list(recorder.captures),
        )


def _count_captures(start: Started, examination: Examination) -> None:
    """Count the launches of graphs, per layer and in all; every graph has the same."""
    captures = start.recorder.captures[len(start.short_captures) :]
    launcher = start.backend.launcher
    buckets = launcher.buckets if isinstance(launcher, GraphLauncher) else []
    examination.counts["graphs"] = len(captures)
    if len(captures) != len(buckets):
        examination.problems.append(
            f"{len(captures)} graphs were captured for {len(buckets)} buckets"
        )
    if not captures:
        return
    kinds = {_histogram(capture.launches) for capture in captures}
    if len(kinds) > 1:
        examination.problems.append(f"graphs of different buckets have different launches: {kinds}")
    examination.counts["launches of a graph"] = len(captures[0].launches)
    config = start.plan.architecture.config
    few = shortened(config, start.backend.launcher.decoder.weights)[0].num_layers
    short = start.short_captures[-1]
    more = Counter(captures[0].launches) - Counter(short.launches)
    examination.counts["launches of a layer"] = {
        f"{launch.kind} {launch.name}": count // (config.num_layers - few)
        for launch, count in sorted(more.items(), key=lambda entry: str(entry[0]))
    }


def _histogram(launches: list[Launch]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(f"{x.kind} {x.name}" for x in launches).items()))


def batches(start: Started, quick: bool) -> Iterator[tuple[str, PackedBatch]]:
    """Yield batches of every size and kind that compile or allocate something of their own."""
    for name, batch in _all_batches(start, quick):
        if batch.num_tokens <= start.plan.max_tokens:
            yield name, batch


def _all_batches(start: Started, quick: bool) -> Iterator[tuple[str, PackedBatch]]:
    rng, most = np.random.default_rng(0), start.plan.max_tokens
    page_size, pages = start.plan.pages.size, start.backend.limits.num_pages
    yield "120 + 10 x 18 tokens", in_one_batch([1] * 120, [[1] * 18] * 10, LABELS)
    yield "300 tokens", in_one_batch([], [[1] * 300], LABELS)
    query = min(2000, most // 2)
    items = [[1] * 20] * ((most - query) // 20)
    yield f"{query} + {len(items)} x 20 tokens", in_one_batch([1] * query, items, LABELS)
    for number in range(0 if quick else 12):
        batch = random_batch(rng, min(pages, 4096) * page_size, page_size)
        yield f"random {number}", replace(batch, num_top=20 * (number % 3 == 0))
    lengths = (16, 33) if quick else (1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 511, 1000, 2049)
    for length in lengths:
        batch = in_one_batch([1] * (length // 2), [[1] * (length - length // 2)], LABELS)
        yield f"{length} tokens", replace(batch, need_lse=np.array([length % 2 == 0]))
    for number, batch in enumerate(largest_batches(most, start.plan.max_model_len, page_size)):
        yield f"largest {number}", batch


def _run_batches(start: Started, examination: Examination, quick: bool) -> None:
    """Run batches two at a time, as the engine does; count their launches and waits."""
    before = None
    per_batch: dict[str, dict[str, int]] = {}
    for name, batch in batches(start, quick):
        recorder = start.recorder
        launches, waits = len(recorder.launches), len(recorder.waits)
        replays = sum(recorder.replays.values())
        pending = start.backend.extend(batch)
        pending.result()  # raise here what failed
        counted = {
            "graphs": sum(recorder.replays.values()) - replays,
            "launches": len(recorder.launches) - launches,
        }
        for wait in recorder.waits[waits:]:
            text = f"waits: {wait.what} in {wait.where}"
            counted[text] = counted.get(text, 0) + 1
        if counted["graphs"] and len(counted) > 2:
            examination.problems.append(f"{name}: the host waits before it collects: {counted}")
        per_batch[name] = counted
        if before is not None:
            start.backend.collect(before)
        before = pending
    if before is not None:
        start.backend.collect(before)
    examination.counts["batches"] = {
        name: counted for name, counted in per_batch.items() if "random" not in name
    }


def _check_memory(start: Started, examination: Examination) -> None:
    """Compare what service took with what was measured at start and planned."""
    plan, heap, pages = start.plan, start.recorder.heap, start.backend.limits.num_pages
    # In eight bits, the plan counts a zero point beside each scale, which only a CPU has.
    beside = 0 if plan.precision == "full" else plan.weight_bytes // 1000
    if not 0 <= plan.weight_bytes - start.weights <= beside:
        examination.problems.append(
            f"the weights take {start.weights} bytes, planned were {plan.weight_bytes}"
        )
    pool = start.backend.launcher.pool
    sides = [side for layer in pool.layers for side in layer]
    took = sum(heap.block_of(side).size for side in sides)
    if took != pages * plan.pages.page_bytes:
        examination.problems.append(
            f"the KV pool takes {took} bytes, {pages} pages of {plan.pages.page_bytes} were planned"
        )
    before = heap.total - start.measured.free
    allowed = before + start.measured.batch + took
    if heap.peak > allowed:
        examination.problems.append(
            f"service took {heap.peak - allowed} bytes more than planned: {heap.peak} in all, with "
            f"{before} of weights and buffers, {took} of pages, {start.measured.batch} measured "
            "for the largest batch"
        )
    if heap.beside > start.graphs:
        examination.problems.append(
            f"executables of graphs take {heap.beside} bytes, {start.graphs} were counted"
        )
    left = heap.total - before - start.measured.batch - start.graphs - took
    if left < 0:
        examination.problems.append(f"{-left} bytes more than the device has were planned")
    examination.notes.append(
        f"{start.weights / 1e9:.2f} GB of weights, {took / 1e9:.1f} GB of pages "
        f"({max(x.numel() for x in sides) / 2**31:.2f} x 2^31 elements per layer and side), "
        f"{start.measured.batch / 1e9:.3f} GB measured for the largest batch, "
        f"{(heap.peak - before - took) / 1e9:.3f} GB taken in service"
    )


def _check_offsets(model: Model, log: TritonLog, examination: Examination) -> None:
    large = 0
    for kernel in log.compiled.values():
        large += any(count > LIMIT for count in kernel.elements.values())
        for offset in narrow_offsets(kernel.ttir, kernel.elements, kernel.integers):
            examination.problems.append(f"{kernel.name}: an offset into {offset}")
    if model.large_pool and not large:
        examination.problems.append("no kernel was given a tensor of over 2^31 elements")
    examination.counts["kernels with tensors of over 2^31 elements"] = large
