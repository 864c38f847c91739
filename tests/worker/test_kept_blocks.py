"""Promise: batches find the memory of earlier batches where it was, until the engine is idle."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gpuscore.processes.worker.child import BEAT, TRIM
from support.serving import QUICK, children, score, serving, wait_until
from support.slow import slow
from support.vitals import MIB, vitals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's heap and /proc")
TOKENS = 500
# Gate and up of a batch of TOKENS take 47 MiB in float32: more than glibc keeps by default.
WIDE = {"intermediate_size": 12288, "num_hidden_layers": 2}  # the last computes one row
WIDEST = TOKENS * 2 * 12288 * 4 // os.sysconf("SC_PAGE_SIZE")  # pages
# Takes a block, frees it, and prints the MiB that stay.
PROBE = """
import os
from pathlib import Path
from gpuscore.system.heap import keep_freed_blocks
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
keep_freed_blocks()
before = resident()
b"x" * (40 << 20)
print(resident() - before)
"""


def mib_of(program, environment=None):
    """Return the numbers that a process of its own prints, whose heap nothing else has used."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | (environment or {}),
        check=True,
        capture_output=True,
        text=True,
    )
    return [int(line) for line in done.stdout.split()]


def faults(pid):
    """Pages that a process has taken without reading a disk."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


@pytest.fixture(scope="module")
def server(tiny_model):
    directory, _ = tiny_model("qwen3", **WIDE)
    with serving(directory, *QUICK, "--dtype", "float32") as running:
        yield running


def batch_of(server, seed):
    ids = np.random.default_rng(seed).integers(0, 400, TOKENS).tolist()
    answer = score(server, query=ids[:-1], items=[ids[-1:]], label_token_ids=[1, 2])
    assert answer.status_code == 200, answer.text


def test_the_second_batch_takes_no_new_pages(server):
    (engine,) = children(server.process.pid)
    batch_of(server, seed=0)
    before = faults(engine)
    batch_of(server, seed=1)
    assert faults(engine) - before < WIDEST / 4, "more than a widest block would take is allowed"


@pytest.mark.slow
def test_an_idle_engine_gives_them_back(server):
    """A batch that is done between two heartbeats counts as work, too."""
    (engine,) = children(server.process.pid)
    batch_of(server, seed=2)
    full = vitals(engine).rss
    wait_until(lambda: vitals(engine).rss < full - 40 * MIB, seconds=3 * TRIM)
    time.sleep(TRIM)
    batch_of(server, seed=3)
    time.sleep(2 * BEAT)
    before = faults(engine)
    batch_of(server, seed=4)
    assert faults(engine) - before < WIDEST / 4


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, False),
        *slow(
            ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, True),
            ({"MALLOC_TRIM_THRESHOLD_": "1048576"}, False),
            ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}, False),
        ),
    ],
)
def test_thresholds_of_the_environment_come_first(environment, kept):
    (grown,) = mib_of(PROBE, environment)
    assert (grown > 30) == kept
