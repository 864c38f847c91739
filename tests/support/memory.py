"""The memory of batches, measured in a process of its own."""

from functools import partial
from pathlib import Path

from gpuscore.backends import plan_backend
from gpuscore.backends.common.batches import largest_batches, largest_in_parts
from gpuscore.backends.common.memory import HostMemory
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.config import ModelConfig
from gpuscore.heap import use_one_arena


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
