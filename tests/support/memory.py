"""The memory of batches and of label heads, measured in a process of its own."""

from functools import partial
from pathlib import Path

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


def growths(rows: int, width: int) -> tuple[int, int]:
    """Return the bytes that a large label head takes: over its first rows, and over all.

    Run it in a new process, as `peaks`.
    """
    use_one_arena()
    head = torch.ones(8 * reference.MAX_TILE // width, width, dtype=torch.bfloat16)
    hidden, chosen = torch.ones(rows, width, dtype=torch.bfloat16), torch.arange(rows)
    first, memory = head[: label_head.repeating_rows(width)], HostMemory()
    assert len(first) < len(head) / 2
    found = []
    for weight in (first, first, head):  # what the first run allocates stays
        run = partial(vocab_statistics, hidden, weight, chosen, num_top=1, impl="reference")
        found.append(memory.growth(run))
    return found[1], found[2]
