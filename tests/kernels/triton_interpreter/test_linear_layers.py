"""Promise: the kernels of linear layers compute the recurrence over the tree of segments, touch no
row and no state of others, and a model scores with them as with torch."""

import importlib
from functools import partial

import numpy as np
import pytest
import torch

from gpuscore import Scorer
from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.backends.torch.kernels import in_triton as compiler
from gpuscore.types.batch import Prefix, Segment, pack
from gpuscore_kernels.delta_net import delta_chunks
from gpuscore_kernels.delta_net import reference as plain
from gpuscore_kernels.delta_rows import convolve, gated_norm
from support.batches import NO_PAGES, int32, item_segments, random_batch
from support.kernels import (
    DEVICE,
    DTYPES,
    assert_near,
    between_nans,
    in_triton,
    planted,
    randn,
)
from support.linear_layers import NET, compare, on_torch, with_states
from support.slow import slow
from support.token_ids import random_ids

SMALL = DeltaNet(1, 2, 4, 4, 7, (True,))


def layer(rng, batch, net=NET, sharp=False):
    run = on_torch(compiler, torch.device(DEVICE))
    compare(rng, with_states(rng, batch), run, net, sharp)


@pytest.mark.parametrize(("seed", "net"), [(0, NET), *slow((1, NET), (3, SMALL))])
def test_random_trees(seed, net):
    rng = np.random.default_rng(seed)
    layer(rng, random_batch(rng, 128, 16), net)


def test_rows_that_overwrite_each_other():
    """Keys are almost alike and nothing decays: an inverse by powers would lose all digits."""
    rng = np.random.default_rng(0)
    segments = [Segment(int32([0] * 70), 0, 0), *item_segments([[0] * 40] * 2, 70, 0, 0, [1])]
    layer(rng, pack(segments, [Prefix(0, NO_PAGES)]), DeltaNet(1, 1, 12, 20, 4, (True,)), True)


def chunks(lengths, sources, ends, heads=(2, 3), sizes=(12, 20)):
    """Compare chunks with the reference in float64; rows and states of others hold NaN, and so does
    the row of padding, which the reference reads."""
    (key_heads, repeat), (key_size, value_size) = heads, sizes
    total, size = sum(lengths) + 5, max(lengths)
    columns = key_heads * (2 * key_size + repeat * value_size)
    convolved = randn(total + 1, columns)
    convolved[:, : 2 * key_heads * key_size] *= key_size**-0.5
    strength = randn(total + 1, key_heads * repeat).sigmoid()
    decay = -randn(total + 1, key_heads * repeat, seed=1).abs()
    before = randn(4, key_heads, key_size, repeat * value_size)
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    rows, used = torch.full((len(lengths), size), total), shuffled[: sum(lengths)]
    for chunk, own in zip(rows, used.split(list(lengths)), strict=True):
        chunk[: len(own)] = own
    others = torch.ones(total + 1, dtype=torch.bool)
    others[used] = False
    unread = sorted(set(range(4)) - set(sources or ()))
    exact = []
    for kind in ("reference", "triton"):
        padding = 0 if kind == "reference" else torch.nan
        for x in (convolved, strength, decay):
            x[others.to(DEVICE)] = padding
        before[unread] = padding
        dtype = torch.float64 if kind == "reference" else torch.float32
        out = torch.full((total + 1, key_heads * repeat, value_size), torch.nan, dtype=dtype)
        out = out.to(DEVICE)
        tensors = (x.to(dtype) for x in (convolved, strength, decay))
        chosen = None if sources is None else torch.tensor(sources, device=DEVICE)
        run = plain.delta_chunks if kind == "reference" else partial(delta_chunks, impl="triton")
        states = run(*tensors, rows.to(DEVICE), chosen, ends, before.to(dtype), out)
        exact.append((out, states))
    (expected, expected_states), (got, got_states) = exact
    assert_near(got[used.to(DEVICE)], expected[used.to(DEVICE)], torch.float32)
    assert_near(got_states, expected_states, torch.float32)
    assert got[others.to(DEVICE)].isnan().all()


def with_a_state_each():
    chunks((7, 20, 3), [2, 0, 1], 2)


@pytest.mark.parametrize(
    ("lengths", "sources", "ends"),
    [
        ((1,), None, 1),
        ((7, 2, 5), [3], 1),
        ((64, 63), [1, 0], 2),
        *slow(((63,), [2], 0), ((64,), None, 1), ((33, 1, 17), [0, 0, 3], 3), ((16,), [1], 1)),
    ],
)
def test_chunks(lengths, sources, ends):
    chunks(lengths, sources, ends)


def test_chunks_that_begin_with_a_state_each():
    with_a_state_each()


def test_many_values_are_divided_among_programs():
    chunks((9, 4), [1, 2], 2, heads=(1, 2), sizes=(40, 48))


def test_other_chunks_change_no_bit():
    """Siblings begin with one state; another of them, or another state, is not seen."""
    tensors = [randn(41, 20), randn(41, 2).sigmoid(), -randn(41, 2, seed=1).abs()]
    rows = torch.arange(40, device=DEVICE).view(2, 20)
    before, results = randn(2, 2, 4, 2), []
    for _ in range(2):
        out, source = torch.zeros(41, 2, 2, device=DEVICE), torch.tensor([1], device=DEVICE)
        states = delta_chunks(*tensors, rows, source, 2, before, out, impl="triton")
        results.append((out, states))
        for x in tensors:
            x[20:40] *= 0.5
        before[0] = 7
    (out, states), (other, others) = results
    assert torch.equal(out[:20], other[:20])
    assert torch.equal(states[0], others[0])
    assert not torch.equal(out[20:40], other[20:40])


def convolution(dtype=torch.float32):
    keys, size, columns, rows = 24, 12, 2 * 24 + 39, 11
    mixed = between_nans(randn(rows, columns, dtype=dtype))
    extra, weight = randn(4, columns, dtype=dtype), randn(4, columns)
    extra[-1] = 0
    places = torch.arange(rows * 4, device=DEVICE).view(rows, 4) * 7 % (rows + 4)
    got = convolve(mixed, extra, places, weight, keys, size, impl="triton")
    expected = plain.convolve(mixed.double(), extra.double(), places, weight.double(), keys, size)
    assert_near(got, expected, torch.float32)
    assert not got[-1].any()


def outputs(dtype=torch.float32):
    x, weight = randn(5, 3, 20), randn(20)
    gate = between_nans(3 * randn(5, 60, dtype=dtype))
    got = gated_norm(x, gate, weight, 1e-3, impl="triton")
    assert got.dtype == dtype
    assert_near(got, plain.gated_norm(x.double(), gate.double(), weight.double(), 1e-3), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype):
    convolution(dtype)
    outputs(dtype)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_what_does_not_fit_is_refused(impl):
    x, weight, places = randn(3, 20), randn(4, 20), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be torch.float32 \\(4, 20\\)"):
        convolve(x, x, places.to(DEVICE), weight[:, :19], 4, 4, impl=impl)
    with pytest.raises(ValueError, match="must be torch.int64"):
        convolve(x, x, places.int().to(DEVICE), weight, 4, 4, impl=impl)
    with pytest.raises(ValueError, match="must be torch.float32 \\(4,\\)"):
        gated_norm(randn(3, 5, 4), x, randn(5), 0.0, impl=impl)
    rows = torch.zeros(2, 65, dtype=torch.int64, device=DEVICE)
    tensors = randn(71, 24), randn(71, 4), randn(71, 4), rows
    with pytest.raises(ValueError, match="2 chunks of 65 rows.*supported: up to 64"):
        delta_chunks(*tensors, None, 1, randn(1, 2, 2, 8), randn(71, 4, 4), impl=impl)
    few = *tensors[:3], rows[:, :9].contiguous()
    with pytest.raises(ValueError, match="2 chunks of 9 rows with 3 states after them"):
        delta_chunks(*few, None, 3, randn(1, 2, 2, 8), randn(71, 4, 4), impl=impl)


@pytest.mark.slow
def test_a_model_scores_as_with_torch(tiny_model, quick_start):
    """A query in chunks, its items, also from cached states; one item is longer than a batch."""
    directory, _ = tiny_model("qwen3_5", num_hidden_layers=3, layer_types=[*LAYERS])
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 40), [random_ids(rng, n) for n in (1, 9, 40)]
    results = []
    for kinds in ({"attention": "torch", "kernels": "torch"}, {}):
        config = in_triton(directory, max_batch_tokens=32, max_model_len=128, **kinds)
        with Scorer(config) as scorer:
            ask = {"label_token_ids": [3, 17, 399], "logprobs": True}
            results.append([scorer.score(query, items, **ask) for _ in range(2)])
    expected, got = results
    assert got[1].cached_tokens == got[0].cached_tokens + 32
    for a, b in zip(got, expected, strict=True):
        assert b.logprobs.std() > 0.5, "near-uniform outputs would prove nothing"
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4, rtol=0)


LAYERS = "linear_attention", "full_attention", "linear_attention"


def long_chunks():
    chunks((40,), [1], 1, heads=(1, 1))


DEFECTS = [
    ("delta_net", "tl.cumsum(tl.load(decay", "0.0 * tl.cumsum(tl.load(decay", with_a_state_each),
    # a state of a sibling, or none
    ("delta_net", "chunk * source_step", "0 * chunk * source_step", with_a_state_each),
    ("delta_net", "after += tl.exp(total) * state", "after += state", with_a_state_each),
    ("delta_net", "result *= tl.exp(log)[:, None]", "", with_a_state_each),
    # no triangular system, or blocks that do not see each other
    ("delta_net", "inverse(system, index, SIZE // ROWS)")
    + ("(index[:, None] == index[None, :]).to(tl.float32)", with_a_state_each),
    ("delta_net", "solved -= product(column, rows)")
    + ("solved += product(tl.where((index // ROWS == done)[:, None], column, 0.0), rows)",)
    + (long_chunks,),
    ("delta_net", "index[:, None] > index[None, :]", "index[:, None] >= index[None, :]")
    + (with_a_state_each,),
    ("delta_net", "inverse(system, index, SIZE // ROWS) * by[None, :]")
    + ("inverse(system, index, SIZE // ROWS)", with_a_state_each),
    ("delta_net", '"tf32x3"', '"tf32"', with_a_state_each),
    # padding that is read
    ("delta_net", "return row, row < last", "return row, index < length", with_a_state_each),
    # another head
    ("delta_net", "key_head = head // REPEAT", "key_head = head % KEY_HEADS", with_a_state_each),
    ("delta_net", "head % REPEAT * VALUE_SIZE", "0", with_a_state_each),
    # rows
    ("delta_rows", "(place - rows) * COLUMNS", "(place - rows) // 2 * COLUMNS", convolution),
    ("delta_rows", "factor * (SIZE**-0.5)", "factor", convolution),
    ("delta_rows", "head * SIZE < 2 * KEYS", "head * SIZE < KEYS", convolution),
    ("delta_rows", "total *= tl.sigmoid(total)", "", convolution),
    ("delta_rows", "place * stride", "place * COLUMNS", convolution),
    ("delta_rows", "opened * tl.sigmoid(opened)", "tl.sigmoid(opened)", outputs),
    ("delta_rows", "/ SIZE + eps", "/ SIZE + 2 * eps", outputs),
]


@pytest.mark.parametrize(("kernel", "old", "new", "check"), DEFECTS[:2] + slow(*DEFECTS[2:]))
def test_a_defect_is_visible(kernel, old, new, check, monkeypatch, tmp_path):
    module = importlib.import_module(f"gpuscore_kernels.{kernel}.triton")
    with planted(monkeypatch, module, old, new, tmp_path), pytest.raises(AssertionError):
        check()
