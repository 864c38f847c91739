"""Promise: an engine with nothing to do gives memory back that batches left in pieces."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from gpuscore.processes.worker.child import TRIM, IdleTrimmer
from gpuscore.types.stats import NO_COUNTERS, NO_STATS
from support.vitals import MIB, vitals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's heap and /proc")
BLOCK, BLOCKS = 100_000, 600  # bytes, too few for a mapping of their own; 57 MiB in all


def stats(requests, batches):
    return replace(NO_STATS, requests=requests, counters=replace(NO_COUNTERS, batches=batches))


def resident():
    return vitals("self").rss


def in_pieces():
    """Free memory below a block that lives on; glibc keeps it."""
    blocks = [np.ones(BLOCK, np.uint8) for _ in range(BLOCKS)]
    del blocks[:-1]
    return blocks


def test_memory_is_given_back_after_work_and_a_pause():
    now = [0.0]
    idle = IdleTrimmer(lambda: now[0])
    held = in_pieces()
    full = resident()
    now[0] = TRIM - 1
    idle.seen(stats(requests=0, batches=1))
    now[0] = TRIM + 1
    idle.seen(stats(requests=1, batches=1))
    idle.seen(stats(requests=0, batches=0))
    assert resident() > full - 20 * MIB, (
        "memory was given back too early, under load, or without any work before"
    )
    idle.seen(stats(requests=0, batches=1))
    assert resident() < full - 40 * MIB
    assert held


def test_memory_is_given_back_once_after_each_work():
    now = [0.0]
    idle = IdleTrimmer(lambda: now[0])
    now[0] = 3 * TRIM
    idle.seen(stats(requests=0, batches=5))
    held = in_pieces()
    full = resident()
    now[0] = 6 * TRIM
    idle.seen(stats(requests=0, batches=5))
    assert resident() > full - 20 * MIB
    idle.seen(stats(requests=0, batches=6))
    assert resident() < full - 40 * MIB
    assert held
