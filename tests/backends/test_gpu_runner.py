"""Promise: on a CUDA device the runner's graphs score as launches do, only `collect` waits, and a
batch that finds no memory fails alone.

The contract's tests, which also run on the device, check the scores.
"""

import os
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.base import OutOfMemory
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.types.request import ScoreRequest
from support.batches import in_one_batch
from support.models import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LABELS = [3, 17, 399]
# By the driver alone, which has pages of 2 MiB: torch's allocator takes memory in steps of 20 MiB,
# so that it could neither take all nor leave a certain rest.
HOG = """
import ctypes, sys
leave, page = int(sys.argv[1]), 2**21
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status not in (0, 2):  # 2: out of memory
        sys.exit(f"{name}: CUDA error {status}")
    return status == 0
def free():
    room, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(room), ctypes.byref(total))
    return room.value
device, context = ctypes.c_int(), ctypes.c_void_p()
for step in (("cuInit", 0), ("cuDeviceGet", ctypes.byref(device), 0),
             ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
             ("cuCtxSetCurrent", context)):
    if not call(*step):
        sys.exit(f"{step[0]}: out of memory")
piece = 2**40
while (surplus := free() - leave) > 0:  # in halves, because tables of pages come on top
    piece = min(piece, -(-surplus // 2 // page) * page)
    if not call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(piece)):
        piece = piece // 2 // page * page
        if not piece:
            sys.exit(f"{surplus} bytes too many are free, and no 2 MiB of them can be had")
print("full", flush=True)
sys.stdin.read()
"""
SMALL_RUN = """
import sys
from pathlib import Path
import numpy as np
from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
sys.path.insert(0, sys.argv[2])
from support.batches import in_one_batch
config = ModelConfig(sys.argv[1], device="cuda", dtype="bfloat16", max_batch_tokens=64,
                     max_model_len=64, cuda_graph_tokens=0, kv_cache_size=2**22)
backend = create_backend(plan_backend(Path(sys.argv[1]), config))
rng = np.random.default_rng(0)
query, *items = (rng.integers(1, 400, n).tolist() for n in (20, 3, 17, 1))
print(backend.collect(backend.extend(in_one_batch(query, items, [3, 17]))).label_logits)
backend.close()
"""


@pytest.fixture
def rng():
    return np.random.default_rng(2)


@pytest.fixture
def make(tiny_model):
    made = []

    def start(family="qwen3", plan=None, model=None, **options):
        directory, _ = tiny_model(family, **(model or {}))
        chosen = {"dtype": "bfloat16", "max_batch_tokens": 4096, "kv_cache_size": 2**26}
        chosen |= {"cuda_graph_tokens": 128 if options.get("kernels") != "torch" else None}
        config = ModelConfig(str(directory), device="cuda", **(chosen | options))
        made.append(create_backend(replace(plan_backend(directory, config), **(plan or {}))))
        made[-1].warmup()
        return made[-1]

    yield start
    for backend in made:
        backend.close()


def some_batches(rng, sizes):
    for query, items in sizes:
        lengths = rng.integers(1, 30, items)
        yield in_one_batch(random_ids(rng, query), [random_ids(rng, n) for n in lengths], LABELS)


SIZES = [(300, 1), (17, 3), (120, 20), (1, 1), (700, 60)]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gemma3"])
def test_graphs_score_as_launches(make, rng, family):
    """A batch padded to its bucket may be rounded differently, but by no more than a bit."""
    graphs, launches = make(family, cuda_graph_tokens=2048), make(family, cuda_graph_tokens=0)
    exact = make(family, dtype="float32", attention="torch", kernels="torch")
    assert isinstance(graphs.launcher, GraphLauncher)
    before = graphs.launcher.replayed  # by the warm-up
    for batch in some_batches(rng, SIZES):
        by_graphs, by_launches, expected = (
            b.collect(b.extend(batch)) for b in (graphs, launches, exact)
        )
        error, usual = (
            np.linalg.norm(x.label_logits - expected.label_logits) for x in (by_graphs, by_launches)
        )
        assert error <= 2 * usual + 1e-3
        np.testing.assert_allclose(by_graphs.lse, by_launches.lse, atol=0.05)
    assert graphs.launcher.replayed - before == len(SIZES)
    assert launches.launcher.replayed == 0


def test_only_collect_waits(make, rng):
    """While `collect` does not run, a copy from the device or any other wait is an error."""
    backend = make(cuda_graph_tokens=2048)
    for sizes in (SIZES, [(1900, 20), (2000, 3)]):  # with graphs, and too large for them
        batches = [replace(b, num_top=1) for b in some_batches(rng, sizes)]
        for batch in batches:
            backend.collect(backend.extend(batch))  # allocate what stays allocated
        with waiting_is_an_error():
            pending = [backend.extend(batch) for batch in batches]
            for launched in pending:
                launched.result()
        for batch, launched in zip(batches, pending, strict=True):
            again = backend.collect(backend.extend(batch))
            np.testing.assert_array_equal(
                backend.collect(launched).label_logits, again.label_logits
            )


def test_nothing_is_compiled_after_the_warm_up(make, rng, monkeypatch):
    from triton import knobs

    backend = make()
    compiled = []
    hook = lambda **event: compiled.append(event["repr"])  # noqa: E731  (None means: go on)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    for batch in some_batches(rng, [(n, n % 7 + 1) for n in (1, 15, 16, 17, 64, 100, 333)]):
        some = rng.random(len(batch.score_rows)) < 0.5
        for asked in (
            batch,
            replace(batch, num_top=1),
            replace(batch, need_lse=some),
            replace(batch, need_lse=np.zeros_like(some)),
        ):
            backend.collect(backend.extend(asked))
    assert compiled == []


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_deterministic_bit_for_bit(tiny_model, rng, attention):
    """Items score alone, together and among other requests, with a cold and a warm prefix cache."""
    directory, _ = tiny_model("qwen3")
    config = ModelConfig(
        str(directory),
        device="cuda",
        dtype="bfloat16",
        attention=attention,
        deterministic=True,
        kv_cache_size=2**26,
    )
    engine = Engine(create_backend(plan_backend(directory, config)))

    def submit(query, items, salt):
        ids = tuple(np.array(item, np.int32) for item in items)
        labels = (np.array(LABELS, np.int32),) * len(items)
        query_ids = np.array(query, np.int32)
        return engine.score(ScoreRequest(query_ids, ids, labels, need_lse=True, salt=salt))

    def rows(future):
        result = future.result(60)
        return np.column_stack((np.stack(result.label_logits), result.lse)).view(np.int32)

    query, items = random_ids(rng, 333), [random_ids(rng, n) for n in (1, 30, 7, 200, 7)]
    alone = np.concatenate([rows(submit(query, [x], f"alone {i}")) for i, x in enumerate(items)])
    for _ in range(2):
        np.testing.assert_array_equal(rows(submit(query, items, "together")), alone)
    crowd = [submit(random_ids(rng, 90), [random_ids(rng, 9)] * 3, "crowd") for _ in range(7)]
    np.testing.assert_array_equal(rows(submit(query, items[::-1], "among"))[::-1], alone)
    wait(crowd)
    engine.close()


@contextmanager
def waiting_is_an_error():
    """Make every operation that waits for the device an error, as far as torch notices it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def memory_hog(leave):
    """Run another process that takes the device's memory until at most `leave` bytes are free,
    and little less."""
    command = [sys.executable, "-c", HOG, str(leave)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "full\n"
        try:
            yield
        finally:
            other.communicate("")


def test_memory_that_others_take_and_give_back(make, rng):
    """A batch that does not fit fails alone; the next one runs, and so does the same batch
    afterwards.

    The large one has hidden states of 60 MiB and needs three of them at once. There are 32 MiB left
    for it, and what torch cannot give back of the pages of 20 MiB that it uses in part. The small
    one runs as a graph and needs two pages of 2 MiB.
    """
    backend = make(max_batch_tokens=16384, dtype="float32", model={"hidden_size": 1024})
    (large,) = some_batches(rng, [(16, 1000)])
    assert large.num_tokens > 14000
    (small,) = some_batches(rng, [(16, 2)])
    before = [backend.collect(backend.extend(batch)) for batch in (large, small)]
    torch.cuda.empty_cache()
    with memory_hog(leave=32 * 2**20):
        with pytest.raises(OutOfMemory):
            backend.collect(backend.extend(large))
        scores = backend.collect(backend.extend(small))
        np.testing.assert_array_equal(scores.label_logits, before[1].label_logits)
    after = [backend.collect(backend.extend(batch)) for batch in (large, small)]
    for scores, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(scores.label_logits, other.label_logits)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_no_kernel_reads_or_writes_where_it_must_not(tiny_model):
    directory, _ = tiny_model("qwen3")
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    # A call that fails is no bad access, and torch makes some: its segments that grow first ask for
    # memory that other machines could share. Where gpuscore makes one, its process fails anyway.
    command += ["--report-api-errors", "no", sys.executable]
    # Every tensor becomes an allocation of its own, so that accesses beside one are found.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, "-c", SMALL_RUN, str(directory), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if "Host Frame" not in line]
    assert done.returncode == 0, "\n".join(lines)[:5000] + done.stderr[-2000:]
