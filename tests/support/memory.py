"""The memory of batches and of label heads, measured in a process of its own."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.common.batches import largest_batches, largest_in_parts
from gpuscore.backends.common.memory import HostMemory
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.config import ModelConfig
from gpuscore.heap import use_one_arena
from gpuscore_kernels import label_head
from gpuscore_kernels.label_head import reference, vocab_statistics


def peaks(
    directory: Path, sizes: tuple[int, int, int], masked: bool, copied: bool
) -> tuple[int | None, list[int | None]]:
    """Return the peaks of the largest batches in bytes: of all together, and of each part.

    sizes: tokens of a batch, positions, and tokens of a page. Run it in a new process: the heap
    becomes that of an engine, and peaks depend on what lies in it.
    """
    use_one_arena()
    config = ModelConfig(str(directory), dtype="float32", max_batch_tokens=sizes[0])
    backend = TorchBackend(plan_backend(directory, config))
    memory = HostMemory()
    whole = memory._peak(lambda: backend._run_all(largest_batches(*sizes)))
    made = largest_in_parts(*sizes, masked=masked, copied=copied)
    parts = [memory._peak(partial(backend._run_all, part)) for part in made]
    backend.close()
    return whole, parts


class HeadMemory(NamedTuple):
    """Bytes that a label head takes over its first rows, and over all."""

    first_live: int  # largest sum of blocks in use at one time
    whole_live: int
    first_aside: int  # set aside for a process that was measured on the first rows
    whole_grown: int  # by which a process grew


def head_memory(rows: int, width: int) -> HeadMemory:
    """Run a large label head. Run this in a new process, as `peaks`."""
    use_one_arena()
    head = torch.ones(8 * reference.MAX_TILE // width, width, dtype=torch.bfloat16)
    hidden, chosen = torch.ones(rows, width, dtype=torch.bfloat16), torch.arange(rows)
    first, memory = head[: label_head.repeating_rows(width)], HostMemory()
    assert len(first) < len(head) / 2

    def over(weight: torch.Tensor) -> Callable[[], object]:
        return partial(vocab_statistics, hidden, weight, chosen, num_top=1, impl="reference")

    memory.growth(over(first))  # what the first run allocates stays
    aside, grown = memory.growth(over(first)), memory._peak(over(head))
    assert aside is not None
    assert grown is not None
    return HeadMemory(most_in_use(over(first)), most_in_use(over(head)), aside, grown)


def most_in_use(run: Callable[[], object]) -> int:
    """Return the largest sum of bytes that torch's CPU allocator had given out at one time."""
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=only_cpu, profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in changes))
