"""Promise: the kernels of linear layers compute the recurrence over the tree of segments, touch no
row and no state of others, and a model scores with them as with torch."""

import importlib

import numpy as np
import pytest
import torch

from gpuscore import Scorer
from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.backends.common.plan import PAGE_SIZE
from gpuscore.backends.torch.kernels import in_triton as compiler
from gpuscore.types.batch import Prefix, Segment, pack
from gpuscore_kernels import delta_net
from gpuscore_kernels.delta_net import Walks
from gpuscore_kernels.delta_net import reference as plain
from support.batches import NO_PAGES, int32, item_segments, random_batch
from support.kernels import (
    DEVICE,
    DTYPES,
    assert_near,
    between_nans,
    in_triton,
    randn,
)
from support.linear_layers import NET, compare, on_torch, with_states
from support.slow import slow
from support.token_ids import random_ids

importlib.import_module("gpuscore_kernels.delta_net.triton")  # sets `delta_net.triton`
SMALL = DeltaNet(1, 2, 4, 4, kernel=7, layers=(True,))


def layer(rng, batch, net=NET, sharp=False):
    run = on_torch(compiler, torch.device(DEVICE), "triton")
    compare(rng, with_states(rng, batch), run, net, sharp=sharp)


@pytest.mark.parametrize(("seed", "net"), [(36, SMALL), *slow((1, NET), (3, SMALL))])
def test_random_trees(seed, net):
    rng = np.random.default_rng(seed)
    layer(rng, random_batch(rng, 128, 16), net)


def test_rows_that_overwrite_each_other():
    """Keys are almost alike and nothing decays: an inverse by powers would lose all digits."""
    rng = np.random.default_rng(0)
    items = item_segments([[0] * 40] * 2, 70, 0, 0, labels=[1])
    batch = pack([Segment(int32([0] * 70), 0, 0), *items], [Prefix(0, NO_PAGES)])
    layer(rng, batch, DeltaNet(1, 1, 12, 20, kernel=4, layers=(True,)), True)


def rule(walks, heads=(2, 3), sizes=(12, 20), changed=slice(0), dtype=torch.float32):
    """Compare walks with the reference in float64. Rows behind the last, and columns and states of
    others hold NaN.

    Each walk is its level, its source, and the rows and targets of its chunks. Where a chunk's rows
    are numbers of siblings' rows, these share it.
    """
    (key_heads, repeat), (key_size, value_size) = heads, sizes
    entries, chains, begins = [], [], []
    for _, source, own in walks:
        chains.append((len(entries), len(entries) + len(own), source))
        for lengths, *targets in own:
            entries.append((len(begins), *targets, *[-1] * (3 - len(targets))))
            for length in lengths if isinstance(lengths, list) else [lengths]:
                begins += [len(begins)] * length
    start = len(begins)
    chunks, chains, begins = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE)
        for x in ([*entries, (start, -1, -1, -1)], chains, begins)
    )
    levels = np.bincount([level for level, _, _ in walks])
    walked = Walks(chunks, chains.split(levels.tolist()), begins, held=2)
    convolved = randn(start + 40, key_heads * (2 * key_size + repeat * value_size))
    convolved[:, : 2 * key_heads * key_size] *= key_size**-0.5
    convolved[changed] *= 0.5
    convolved[start:] = torch.nan
    convolved = convolved.to(dtype)
    gates = between_nans(2 * randn(start, 2 * key_heads * repeat))
    decay, bias = -randn(key_heads * repeat).abs(), randn(key_heads * repeat, seed=1)
    pool = randn(4, key_heads, key_size, repeat * value_size)
    pool[sorted(set(range(4)) - {source for _, source, _ in walks})] = torch.nan
    results = []
    for run, kind in ((plain.delta_rule, torch.float64), (delta_net.triton.delta_rule, dtype)):
        after = pool.to(max(kind, torch.float32, key=lambda d: d.itemsize), copy=True)
        tensors = (x.to(after.dtype) for x in (gates, decay, bias))
        results.append((run(convolved[:start].to(kind), *tensors, walked, after), after))
    most = None if dtype == torch.float32 else 2e-3  # TF32, with which only sums are taken
    for got, expected in zip(results[1], results[0], strict=True):
        assert_near(got.nan_to_num(7.0), expected.nan_to_num(7.0), torch.float32, most)
    return results[1]


# From a state, and from zeros; then siblings from an end that is held, and one from another's slot.
TREE = [
    (0, 2, [(64,), (7, -2, 0)]),
    (0, -1, [(3, 1)]),
    (2, -2, [(20,), (64, 2), (1,)]),
    (2, 1, [(2, -3)]),
    (3, -2, [([5, 9, 1, 40],)]),
]


def test_a_tree():
    rule(TREE)


def test_a_chain():
    rule([(0, 3, [(20, -2), (64,), (9, 3, 1)])], heads=(1, 2))


def test_two_ends():
    rule([(0, -1, [(2, -2)]), (0, 1, [(3, -3)]), *((1, n, [(2,)]) for n in (-2, -3))], heads=(1, 1))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rows_of_16_bits_read_and_write_states_of_32(dtype):
    rule(TREE, heads=(1, 2), dtype=dtype)


@pytest.mark.slow
def test_many_values_are_divided_among_programs():
    rule([(0, 1, [(9,), (4, 1)])], heads=(1, 2), sizes=(40, 80))


def test_other_walks_change_no_bit():
    """Siblings begin with one state; another of them is not seen."""
    first = slice(166, 175)  # rows of a sibling that shares its chunk
    (out, pool), (other, after) = (rule(TREE, (1, 1), (4, 4), x) for x in (slice(0), first))
    assert torch.equal(out[: first.start], other[: first.start])
    assert torch.equal(out[first.stop :], other[first.stop :])
    assert not torch.equal(out[first], other[first])
    assert torch.equal(pool.nan_to_num(7.0), after.nan_to_num(7.0))


def test_tails():
    """Rows of the batch, of other slots, and of their own, and an entry of a graph's room."""
    mixed, memory = between_nans(randn(5, 40)), randn(5, 3, 40, seed=1)
    kept, before = memory[1:], memory[0].clone()  # slot -1 would be there
    entries = [[2, -2 - 4, -2 - 5, 0], [1, -2 - 5, 1, 2], [0, -1, -1, 4], [-1, 3, 3, 3]]
    expected = kept.clone()
    table = torch.tensor([*entries, [0, 2, 2, 2]], dtype=torch.int32, device=DEVICE)
    delta_net.triton.keep_tails(mixed, kept, table)
    plain.keep_tails(mixed, expected, table[:4])
    assert torch.equal(kept, expected)
    assert torch.equal(memory[0], before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_convolution(dtype):
    keys, size, columns, rows = 24, 12, 2 * 24 + 39, 11
    mixed = between_nans(randn(rows, columns, dtype=dtype))
    kept, weight = randn(2, 3, columns, dtype=dtype), randn(4, columns)
    places = torch.arange(rows * 3, device=DEVICE).view(rows, 3).int() * 7 % (rows + 7) - 7
    got = delta_net.triton.convolve(mixed, kept, places, weight, keys=keys, size=size)
    wide = mixed.double(), kept.double(), places, weight.double()
    expected = plain.convolve(*wide, keys, size)
    assert_near(got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs(dtype):
    x, weight = randn(5, 3, 20), randn(20)
    gate = between_nans(3 * randn(5, 60, dtype=dtype))
    got = delta_net.triton.gated_norm(x, gate, weight, 1e-3)
    assert got.dtype == dtype
    assert_near(got, plain.gated_norm(x.double(), gate.double(), weight.double(), 1e-3), dtype)


@pytest.mark.slow
def test_a_model_scores_as_with_torch(tiny_model, quick_start):
    """A query in chunks, its items, also from cached states; one item is longer than a batch."""
    directory, _ = tiny_model("qwen3_5", num_hidden_layers=3, layer_types=[*LAYERS])
    rng = np.random.default_rng(0)
    cached = 2 * PAGE_SIZE[DEVICE]  # whole pages of the query
    query, items = random_ids(rng, cached + 8), [random_ids(rng, n) for n in (1, 9, 40)]
    results = []
    for kinds in ({"attention": "torch", "kernels": "torch"}, {}):
        config = in_triton(directory, max_batch_tokens=32, max_model_len=256, **kinds)
        with Scorer(config) as scorer:
            ask = {"label_token_ids": [3, 17, 399], "logprobs": True}
            results.append([scorer.score(query, items, **ask) for _ in range(2)])
    expected, got = results
    assert got[1].cached_tokens == got[0].cached_tokens + cached
    for a, b in zip(got, expected, strict=True):
        assert b.logprobs.std() > 0.5, "near-uniform outputs would prove nothing"
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4, rtol=0)


LAYERS = "linear_attention", "full_attention", "linear_attention"
