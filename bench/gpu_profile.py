"""A profile of a batch: its stages, measured by difference, and its kernels by name."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from clock import on_device
from gpu_work import Batches, Draws, Goal
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.decoder import Attend
from gpuscore.backends.torch.kv_pool import KeptRows
from gpuscore.types.batch import PackedBatch

REPEAT = 5
TOP = 25


def stages(backend: TorchBackend, goal: Goal, floor: dict[str, Any] | None) -> dict[str, Any]:
    """Measure the device's milliseconds in each part of one workload's largest batch.

    Attention is a forward pass minus one whose attention returns the queries. Head, copies and
    padding are the launched batch minus a forward pass of the same kernels, launched one by one and
    without padding.
    """
    draws = Draws(goal.workload, backend.limits.vocab_rows, seed=5000)
    batches = Batches(backend, goal.workload)
    works = batches.packed(draws.next())
    batch = max((work.batch for work in works), key=lambda one: one.num_tokens)
    runner = backend.launcher

    def attend(batch: PackedBatch) -> Attend:
        return runner.attention.prepare(batch).run

    def queries(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    launched = _milliseconds(lambda: runner.launch(batch), backend.device)
    whole = _milliseconds(_pass(backend, batch, attend(batch)), backend.device)
    without = _milliseconds(_pass(backend, batch, queries), backend.device)
    found = {
        "launched": launched,
        "attention": whole - without,
        "products and element-wise": without,
        "head, copies, padding": launched - whole,
    }
    if floor is not None and len(works) == 1:
        products = sum(ms for name, ms in floor["products ms"].items() if name != "head")
        found["products alone, from the ceilings"] = products
        found["so element-wise"] = without - products
    return {"tokens": batch.num_tokens} | {name: round(ms, 3) for name, ms in found.items()}


def _pass(backend: TorchBackend, batch: PackedBatch, attend: Attend) -> Callable[[], object]:
    runner, device = backend.launcher, backend.device
    sides = (batch.token_ids, batch.positions, batch.score_rows)
    inputs = [torch.from_numpy(side).to(device, torch.int64) for side in sides]
    kept = KeptRows.of(batch.slot_mapping, runner.pool)

    def run() -> Tensor:
        with torch.inference_mode():
            return runner.decoder.forward(*inputs, attend, kept)

    return run


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):
        run()
    return statistics.median(1e3 * on_device(run, device, 0.05).seconds for _ in range(REPEAT))


def kernels(backend: TorchBackend, goal: Goal) -> list[dict[str, Any]]:
    """Return the kernels that take most of one request's time; on a CPU, torch's operators.

    Raises:
        RuntimeError: the profiler saw no kernels.
    """
    draws = Draws(goal.workload, backend.limits.vocab_rows, seed=6000)
    batches = Batches(backend, goal.workload)
    on_cuda = backend.device.type == "cuda"
    works = batches.packed(draws.next())
    _run(backend, works)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities, acc_events=True) as found:
        _run(backend, works)
    rows = []
    for event in found.key_averages():
        # An operator's time includes its kernels, which are events of their own: count only one.
        if (event.device_type == DeviceType.CUDA) == on_cuda:
            spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            rows.append({"ms": spent / 1e3, "calls": event.count, "name": event.key})
    total = sum(row["ms"] for row in rows)
    if not total:
        raise RuntimeError("torch's profiler saw no kernels on this machine")
    rows.sort(key=lambda row: -row["ms"])
    return [row | {"share": round(row["ms"] / total, 4)} for row in rows[:TOP]]


def _run(backend: TorchBackend, works: list[Any]) -> None:
    for wait in [backend.launcher.launch(work.batch) for work in works]:
        wait()
