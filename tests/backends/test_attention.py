"""Promise: attention on a CPU, in C for every kind of CPU and in plain torch, computes what the
oracle of the mask rule computes."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.attention.tiled import TorchAttention
from gpuscore.backends.torch.compiler import cc
from gpuscore.backends.torch.kv_pool import KeptRows, KVPool
from support.attention_forms import MACHINES, form, native, runs_here
from support.attention_inputs import heads_alone, relative_error
from support.attention_oracle import attention as oracle
from support.batches import random_batch
from support.slow import slow

PAGE_SIZE, NUM_SLOTS = 16, 2048
CPU = torch.device("cpu")
# Largest error, as a share of the answer; in half precision queries, weights and results round.
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
QWEN = heads_alone(4, 2, 16)


def batch_of(seed):
    batch = random_batch(np.random.default_rng(seed), NUM_SLOTS, PAGE_SIZE)
    return batch if batch.num_tokens else batch_of(seed + 100)


# Under 300 tokens, in trees, with segments of 40 to 111 and cached prefixes.
SHORT = [batch_of(seed) for seed in (45, 46, 12, 34)]


def poisoned_pool(batch, config, dtype, generator):
    """Return a pool with random keys and values in the cached slots and NaN everywhere else, page
    tails included."""
    pool = KVPool(config, NUM_SLOTS // PAGE_SIZE, PAGE_SIZE, dtype, CPU)
    cached = [
        batch.page_table[r, i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE
        for r, length in enumerate(batch.prefix_lens)
        for i in range(length)
    ]
    for sides in pool.layers:
        for side in sides:
            values = torch.randn(side.shape, generator=generator).to(dtype)
            side.fill_(torch.nan)
            side[:, cached] = values[:, cached]
    return pool


def worst(function, batch, config=QWEN, dtype=torch.float32, steady=False):
    """Return the largest error of all layers, as a share of the oracle's answer; the last layer
    gives only the scored rows."""
    generator = torch.Generator().manual_seed(1)
    pool = poisoned_pool(batch, config, dtype, generator)
    before = [[exact(side.transpose(0, 1)) for side in sides] for sides in pool.layers]
    heads, dim = (config.num_heads, config.num_kv_heads), config.head_dim
    q = torch.randn(heads[0], batch.num_tokens, dim, generator=generator).to(dtype).transpose(0, 1)
    kv = torch.randn(batch.num_tokens, 2 * heads[1], dim, generator=generator).to(dtype)
    k, v = kv.chunk(2, dim=1)
    stored = KeptRows.of(batch.slot_mapping, pool)
    rows = torch.from_numpy(batch.score_rows.astype(np.int64))
    errors = []
    for layer, chosen in ((0, slice(None)), (1, rows)):
        how = config.windows[layer], config.attention_softcap
        expected = oracle(batch, PAGE_SIZE, *map(exact, (q, k, v)), *before[layer], *how)
        stored.write(layer, k, v)
        attend = TorchAttention(config, pool, function, steady).prepare(batch)
        got = attend.run(layer, q[chosen], k, v)
        if len(got):
            errors.append(relative_error(got, torch.from_numpy(expected)[chosen]))
    return max(errors)


def exact(side):
    return side.double().numpy()


@pytest.mark.parametrize("steady", [False, True], ids=["", "steady"])
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("machine", ["native", "plain"])
def test_random_batches(machine, dtype, steady):
    for seed in range(2 if machine == "native" else 1):
        assert (
            worst(form(machine, dtype), batch_of(seed), dtype=dtype, steady=steady) < ALLOWED[dtype]
        )


@pytest.mark.parametrize(
    ("machine", "dtype"),
    [
        ("x86-64-v3", torch.float32),
        ("x86-64-v4", torch.bfloat16),
        *slow(*((machine, dtype) for machine in MACHINES for dtype in ALLOWED)),
    ],
    ids=str,
)
def test_other_instructions(machine, dtype):
    if not runs_here(machine):
        pytest.skip(f"this CPU is older than {machine}")
    for seed in range(3):
        config = replace(
            heads_alone(6, 2, 80), windows=(None, 21), attention_softcap=(None, 9)[seed % 2]
        )
        assert worst(form(machine, dtype), batch_of(seed), config, dtype) < ALLOWED[dtype]


# Heads, KV heads and head sizes: groups of 1 to 200 heads, sizes of real models and odd ones.
HEADS = [
    *((1, 1, 64), (14, 2, 80), (7, 1, 96), (6, 3, 128), (64, 1, 64), (10, 5, 256), (200, 1, 8)),
    *((3, 1, 1), (5, 5, 7), (4, 2, 33), (2, 1, 512)),
]


# The sanitizers' test has all heads in each format.
@pytest.mark.parametrize(("sizes", "dtype"), [*zip(HEADS, cycle(ALLOWED))], ids=str)
def test_heads_of_all_sizes(sizes, dtype):
    assert worst(native(dtype), SHORT[sum(sizes) % 4], heads_alone(*sizes), dtype) < ALLOWED[dtype]


@pytest.mark.parametrize("machine", ["native", "plain"])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 1000])
def test_windows_count_positions_not_rows(machine, window):
    for softcap in (None, 0.7):
        config = replace(QWEN, windows=(window, window), attention_softcap=softcap)
        steady = window % 2 == 0
        assert worst(form(machine, torch.float32), SHORT[-1], config, steady=steady) < 5e-6


@pytest.mark.parametrize("machine", ["native", "plain"])
@pytest.mark.parametrize("window", [None, 3])
def test_rows_in_the_middle_of_a_segment_can_be_scored(machine, window):
    batch = batch_of(5)
    rows = np.arange(batch.num_tokens, dtype=np.int32)[::3]
    config = replace(QWEN, windows=(window, window))
    got = worst(form(machine, torch.float32), replace(batch, score_rows=rows), config)
    assert got < ALLOWED[torch.float32]


def by_head(batch, function, rows, steady, config=QWEN, threads=2):
    """Return the results of rows of a batch; token ids name random queries, keys and values."""
    generator = torch.Generator().manual_seed(2)
    pool = KVPool(config, 128, 16, torch.bfloat16, CPU)
    q, k, v = (
        torch.randn(9, n, config.head_dim, generator=generator).bfloat16() for n in (4, 2, 2)
    )
    ids = torch.from_numpy(batch.token_ids.astype(np.int64))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        attend = TorchAttention(config, pool, function, steady).prepare(batch)
        return attend.run(0, q[ids], k[ids], v[ids])[rows]
    finally:
        torch.set_num_threads(before)


def test_threads_change_no_bit():
    batch, rows = batch_of(3), slice(None)
    several = by_head(batch, native(torch.bfloat16), rows, steady=False)
    assert torch.equal(by_head(batch, native(torch.bfloat16), rows, False, threads=1), several)


# ---- numbers that are not finite ----


@pytest.mark.parametrize("flaw", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("machine", ["native", "plain"])
def test_a_flaw_reaches_the_rows_that_see_it_alone(machine, dtype, flaw):
    """A key reaches the rows behind it in its window and KV head; a query its row and head."""
    config = replace(QWEN, windows=(9, 9))
    batch = batch_of(2)
    longest = np.diff(batch.cu_seqlens).argmax()
    row = int(batch.cu_seqlens[longest]) + 40
    assert batch.cu_seqlens[longest + 1] > row + 20
    pool = KVPool(config, 128, 16, dtype, CPU)
    q, k, v = (torch.randn(batch.num_tokens, n, 16).to(dtype) for n in (4, 2, 2))
    run = TorchAttention(config, pool, form(machine, dtype)).prepare(batch).run
    expected = run(0, q, k, v)
    k[row, 1], v[row, 1] = torch.nan, 0  # as `norm_and_rotate` marks it
    q[row + 15, 0, 3] = flaw
    got = run(0, q, k, v)
    touched = got.isnan().any(-1).nonzero().tolist()
    assert touched == sorted([[row + i, h] for i in range(9) for h in (2, 3)] + [[row + 15, 0]])
    assert got[row : row + 9, 2:].isnan().all()
    same = ~got.isnan()
    assert torch.equal(got[same], expected[same])


# ---- memory ----


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["native", "x86-64"])
def test_sanitizers_find_nothing(machine, tmp_path):
    """Odd shapes in all formats on one thread, whose scratch memory then ends where it has to."""
    flags = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"
    runtimes = [
        subprocess.run(
            (cc(), f"-print-file-name={name}"), capture_output=True, text=True, check=True
        )
        for name in ("libasan.so", "libubsan.so", "libgomp.so.1")
    ]
    preloaded = " ".join(done.stdout.strip() for done in runtimes)
    program = Path(__file__).parents[1] / "support" / "attention_sanitized.py"
    environment = os.environ | {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-P", program, machine, *flags],
        env=environment | {"PYTHONPATH": str(program.parents[1])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right") == 3 * len(HEADS), done.stdout
