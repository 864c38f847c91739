"""The memory of batches and of label heads, measured in a process of its own."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.common.memory import HostMemory
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.config import ModelConfig
from gpuscore.system.heap import use_one_arena
from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack, page_slots
from support.batches import int32, item_segments
from support.token_ids import random_ids


class BatchMemory(NamedTuple):
    """Bytes of batches: measured at start, and taken by random ones."""

    parts: int  # that were measured one after the other
    measured: int
    taken: int
    pages: int  # of the pool, to which queries are written


def measured_and_taken(directory: Path, largest: int, longest: int, count: int) -> BatchMemory:
    """Start a backend, and run `count` random batches of `largest` tokens on it.

    longest: tokens of a prompt. Run it in a new process: the heap is set up as an engine's, and
    peaks depend on what lies in it.
    """
    use_one_arena()
    pairs: list[tuple[int, int]] = []

    class Noting(HostMemory):
        def growth(self, *parts: Callable[[], object]) -> int | None:
            grown = super().growth(*parts)
            assert grown is not None
            pairs.append((len(parts), grown))
            return grown

    config = ModelConfig(str(directory), dtype="float32", max_batch_tokens=largest)
    memory = Noting()
    backend = TorchBackend(plan_backend(directory, config), memory)
    ((parts, measured),) = pairs
    rng = np.random.default_rng(0)
    size = backend.limits.page_size
    batches = [_full_batch(rng, largest, size, longest // 2) for _ in range(count)]
    taken = memory.peak(partial(backend.run_all, batches))
    assert taken is not None
    pages = longest // 16 * backend.plan.pages.page_bytes
    backend.close()
    return BatchMemory(parts, measured, taken, pages)


def _full_batch(rng: np.random.Generator, largest: int, page_size: int, far: int) -> PackedBatch:
    """Return a full batch: a query part that is kept, and items of many lengths over a long
    prefix."""
    longest = int(rng.choice([1, 2, 5, 20, 63, 300]))
    prefix = int(rng.integers(0, far - longest))
    pages = int32(np.arange(far // 8))
    query = int(rng.choice([0, 1, 100, largest // 2]))
    lengths = rng.integers(1, longest + 1, largest).tolist()
    while query + sum(lengths) > largest:
        lengths.pop()
    segments = []
    if query:
        slots = page_slots(pages, prefix, prefix + query, page_size)
        segments.append(Segment(int32(random_ids(rng, query)), prefix, 0, slots=slots))
    items = [random_ids(rng, n) for n in lengths]
    parent = 0 if query else -1
    labels = rng.integers(0, 400, int(rng.choice([1, 2, 40]))).tolist()
    segments += item_segments(items, prefix + query, 0, parent, labels)
    return pack(segments, [Prefix(prefix, pages[: -(-prefix // page_size)])], num_top=1)


def most_in_use(run: Callable[[], object]) -> int:
    """Return the largest sum of bytes that torch's CPU allocator had given out at one time."""
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=only_cpu, profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in changes))
