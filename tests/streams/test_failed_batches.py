"""Promise: a batch that fails gives its buffers back, so that none after it pins memory, and only
when nothing that it has queued uses them any more."""

from itertools import count

import numpy as np
import pytest

from gpuscore.backends.base import OutOfMemory
from support.batches import in_one_batch
from support.slow import slow
from support.streams.worlds import Life

LABELS = [3, 17]
SMALL, LARGE = (9, (3, 5)), (20, (9, 30))  # tokens of the query and the items; a graph, launches


def some_batch(sizes):
    rng = np.random.default_rng(0)
    query, *items = (rng.integers(1, 1000, n).tolist() for n in (sizes[0], *sizes[1]))
    return in_one_batch(query, items, LABELS)


def until_it_fits(life, real, batch):
    """Run the batch with ever more allocations that succeed; return how often it failed."""
    for failures in count():
        life.faults.memory_in = failures
        try:
            real.collect(real.extend(batch))
        except OutOfMemory:
            continue
        return failures


@pytest.mark.parametrize(("sizes", "least"), [(SMALL, 3), *slow((LARGE, 20))])
def test_batches_after_a_failed_one_pin_no_memory(model, monkeypatch, sizes, least):
    life = Life(model, 0)
    with life.started() as real:
        batch = some_batch(sizes)
        real.collect(real.extend(batch))
        pinned = []
        monkeypatch.setattr(life.recorder, "pin", pinned.append)
        failures = until_it_fits(life, real, batch)
        life.faults.memory_in = None
        pending = [real.extend(batch) for _ in range(2)]
        for launched in pending:
            real.collect(launched)
    assert failures >= least
    assert pinned == []
    assert life.kinds() == set()


def test_a_host_without_memory_keeps_the_buffers_too(model, monkeypatch):
    """Scores are copied out of the buffers before the next batch takes them."""
    life = Life(model, 0)
    with life.started() as real:
        finish = real.extend(some_batch(SMALL)).result()
        free = len(real.launcher._free)
        monkeypatch.setattr("support.streams.host_arrays.HostArray.copy", no_memory)
        with pytest.raises(MemoryError):
            finish()
        monkeypatch.undo()
        assert len(real.launcher._free) == free + 1


def no_memory(array, *_):
    raise MemoryError(f"{array.nbytes} bytes")
