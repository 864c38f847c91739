"""Promise: the torch backend with `--attention triton` and fa4 scores as with torch, in the
interpreter or on a GPU."""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.torch.attention import tiled
from gpuscore.config import ModelConfig
from gpuscore.types.batch import Prefix, Rows, Segment, pack, page_slots
from support.batches import Pages, int32, item_segments
from support.kernels import DEVICE, INTERPRETED
from support.slow import slow
from support.token_ids import random_ids

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def make_backend(tiny_model, quick_start):
    made = []

    def make(family, attention, dtype="float32", kernels="auto", **plan):
        directory, _ = tiny_model(family, **SMALL)
        config = ModelConfig(
            str(directory),
            device=DEVICE,
            attention=attention,
            kernels=kernels,
            dtype=dtype,
            max_batch_tokens=24,
            max_model_len=64,
            kv_cache_size=2**22,
        )
        made.append(create_backend(replace(plan_backend(directory, config), **plan)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batches(page_size):
    """Yield a query's first chunk, which goes into pages; then the rest beside items and another
    request."""
    rng = np.random.default_rng(0)
    pages = Pages.shuffled(rng, 8, page_size).of(0, 24)
    query, other = int32(random_ids(rng, 24)), int32(random_ids(rng, 7))
    slots = page_slots(pages, 0, 19, page_size)
    yield pack([Segment(query[:19], 0, 0, slots=slots)], [Prefix(0, pages)])
    items = [random_ids(rng, n) for n in (1, 5, 2)]
    segments = [Segment(query[19:], 19, 0)]
    segments += item_segments(items, 24, 0, 0, labels=[3, 17])
    segments += item_segments([other], 0, 1, -1, labels=[3, 17])
    yield pack(segments, [Prefix(19, pages), Prefix(0, pages[:0])])


def scores(backend):
    for batch in batches(backend.limits.page_size):
        result = backend.collect(backend.extend(batch))
    return np.concatenate((result.label_logits, result.lse))


@pytest.mark.parametrize("family", ["qwen3", *slow("gemma2")])
def test_the_same_scores_as_torch(make_backend, family):
    expected = scores(make_backend(family, "torch"))
    got = scores(make_backend(family, "triton"))
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


@pytest.mark.skipif(not INTERPRETED, reason="the stand-in is for a CPU")
@pytest.mark.usefixtures("fa4_stands_in")
def test_fa4_with_a_kernel_that_stands_in(make_backend):
    """The first batch has a graph, the second one is too large for it."""
    expected = scores(make_backend("qwen3", "torch"))
    backend = make_backend("qwen3", "fa4", kernels="triton", graph_tokens=19)
    backend.launcher.buckets = backend.launcher.buckets[-1:]  # each is captured, which takes long
    backend.warmup()
    np.testing.assert_allclose(scores(backend), expected, atol=2e-5, rtol=0)
    assert (backend.launcher.replayed, backend.launcher.launched) == (1, 1)


def test_a_prompts_tables_are_those_of_its_length(make_backend, monkeypatch):
    """They are kept for the next one as long; a rest, other rows and two segments have theirs."""
    attention = make_backend("mistral", "triton").launcher.attention
    monkeypatch.setattr(tiled, "KEPT", 2)
    size, rng = attention.pool.page_size, np.random.default_rng(0)
    pages = Pages.shuffled(rng, 8, size).of(0, 40)
    for length in (20, 33, 20, 21, 33, 20):
        ids = int32(random_ids(rng, length))
        prompt = Segment(ids, 0, 0, label_ids=int32([3]))
        for segments, cached in (
            ([prompt], 0),
            ([replace(prompt, rows=Rows.every(ids))], 0),
            ([replace(prompt, start=19)], 19),
            ([Segment(ids[:7], 0, 0), replace(prompt, token_ids=ids[7:])], 0),
        ):
            batch = pack(segments, [Prefix(cached, pages[: -(-cached // size)])])
            got = attention.tables(batch)
            fresh = tiled.build_tables(batch, attention.config, size, attention.shape)
            for table, expected in zip(got, fresh, strict=True):
                for part, value in zip(table, expected, strict=True):
                    np.testing.assert_array_equal(part, value)
        whole = pack([prompt], [Prefix(0, pages[:0])])
        assert attention.tables(whole) is attention.tables(whole)
