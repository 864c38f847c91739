"""Promise: the query's end and the only item of a request are one segment, which changes nothing
else of its batches."""

from dataclasses import fields, replace

import numpy as np
import pytest

from gpuscore.engine.jobs import build_batch
from gpuscore.engine.plan import plan_items
from gpuscore.engine.scheduler import Scheduler
from gpuscore.types.batch import BackendLimits, visible_rows
from gpuscore.types.request import ScoreRequest
from support.batches import int32
from support.slow import slow

LIMITS = BackendLimits(max_tokens=64, page_size=4, num_pages=64, max_model_len=200, vocab_rows=900)


@pytest.mark.parametrize("seed", [1, *slow(*range(2, 12))])
def test_as_two_segments(seed):
    rng, joined = np.random.default_rng(seed), 0
    for _ in range(30):
        query, item = (
            rng.integers(0, 900, int(n)).astype(np.int32)
            for n in (rng.integers(0, 140), rng.integers(1, 64))
        )
        request = ScoreRequest(query, (item,), (int32([3, 5]),), need_lse=True)
        # With fixed bits an item is always a segment.
        apart = batches_of(request, replace(LIMITS, deterministic_chunk=1))
        for ours, other in zip(batches_of(request, LIMITS), apart, strict=True):
            np.testing.assert_array_equal(visible_rows(ours), visible_rows(other))
            for field in fields(ours):
                if field.name not in ("cu_seqlens", "parent", "request_of"):
                    mine, others = (getattr(batch, field.name) for batch in (ours, other))
                    np.testing.assert_array_equal(mine, others, err_msg=field.name)
            assert len(ours.parent) == 1
            joined += len(other.parent) - 1
    assert joined > 10


def batches_of(request, limits):
    scheduler, batches = Scheduler(limits), []
    scheduler.add(plan_items(request, scheduler.limits))
    while chunks := scheduler.schedule():
        batches.append(build_batch(chunks, limits))
        scheduler.succeeded(chunks)
    return batches
