"""Promise: linear layers compute the recurrence over the tree of segments, whatever the layout, and
every defect planted on purpose is seen."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuscore import Scorer
from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.backends.torch import backend as torch_backend
from gpuscore.backends.torch.compiler import eagerly
from gpuscore.backends.torch.delta_net import layout
from gpuscore.backends.torch.delta_net.layer import DeltaNetPass
from gpuscore.backends.torch.rows_in_c import in_c
from gpuscore.backends.torch.words import WordPlaces
from gpuscore.engine import jobs
from gpuscore.types.batch import Prefix, Segment, pack, page_slots, visible_rows
from support.batches import NO_PAGES, Pages, int32, item_segments, random_batch
from support.linear_layers import NET, compare, drawn, on_torch, with_states
from support.models import random_ids, reference_logprobs

LABELS = [3, 17, 399]
VISIBLE = 1e-2


def states_of(batch):
    return zip(batch.state_rows.tolist(), batch.state_slots.tolist(), strict=True)


RUNS = {
    "torch": lambda: on_torch(eagerly),
    "c": lambda: on_torch(in_c(torch.float32)),
}


@pytest.fixture(scope="module", params=RUNS)
def run_layer(request):
    return RUNS[request.param]()


NETS = NET, DeltaNet(3, 3, 8, 4, 2, (True,)), DeltaNet(1, 2, 4, 4, 7, (True,))


@pytest.mark.parametrize("seed", range(12))
def test_random_trees(seed, run_layer):
    """Heads are grouped, equal, or have a wide convolution."""
    rng, net = np.random.default_rng(seed), NETS[seed % 3]
    compare(rng, with_states(rng, random_batch(rng, 4096, 16)), run_layer, net)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 200])
def test_chains_of_short_segments(length, run_layer):
    """A convolution sees rows of several ancestors; chunks of 64 end within segments, or with."""
    rng = np.random.default_rng(length)
    lengths = [length, 1, 1, 1, 2, 1, length, 1]
    segments = [Segment(int32([0] * n), 0, 0, parent=index - 1) for index, n in enumerate(lengths)]
    compare(rng, with_states(rng, pack(segments, [Prefix(0, NO_PAGES)])), run_layer)


def test_rows_that_overwrite_each_other(run_layer):
    """Keys are almost alike and nothing decays: an inverse by powers would lose all digits."""
    rng = np.random.default_rng(0)
    segments = [Segment(int32([0] * 150), 0, 0), *item_segments([[0] * 40] * 5, 150, 0, 0, [1])]
    compare(rng, with_states(rng, pack(segments, [Prefix(0, NO_PAGES)])), run_layer, NET, True)


def test_rows_of_a_tail_that_is_overwritten(run_layer):
    """The first of two rows is kept elsewhere, with rows of the slot that gets the second."""
    rng, pages = np.random.default_rng(0), Pages.shuffled(np.random.default_rng(0), 4, 16)
    chunk = Segment(int32([0] * 2), 20, 0, states=[(1, 7), (2, 5)])
    compare(rng, pack([chunk], [Prefix(20, pages.of(0, 20), 5)]), run_layer)


def test_a_state_that_others_begin_with_is_not_overwritten():
    pages = Pages.shuffled(np.random.default_rng(0), 4, 16).of(0, 20)
    two = [Segment(int32([0] * 2), 20, 0, states=[(2, 5)]), Segment(int32([0]), 20, 0)]
    with pytest.raises(ValueError, match="slot 5 is overwritten while others begin with it"):
        layout.lay_out_states(pack(two, [Prefix(20, pages, 5)]), 4, False)


@pytest.mark.parametrize(("count", "depth", "fits"), [(16, 2, 1), (17, 2, 0), (1, 3, 0)])
def test_a_graph_has_room_for_few_held_states_and_depths(count, depth, fits):
    segments = [
        Segment(int32([0]), n % depth, n // depth, parent=n - 1 if n % depth else -1)
        for n in range(count * depth)
    ]
    tables = layout.lay_out_states(pack(segments, [Prefix(0, NO_PAGES)] * count), 4, True)
    assert WordPlaces.of(layout.table_specs(64, 64, 4), 0).hold(tables) == fits


@pytest.mark.parametrize("seed", range(4))
def test_a_row_that_is_not_finite_reaches_its_descendants_alone(seed, run_layer):
    rng = np.random.default_rng(seed)
    batch = with_states(rng, random_batch(rng, 4096, 16))
    weights, rows, slots = drawn(rng, batch)
    expected, kept = run_layer(batch, NET, weights, rows, slots)
    segment = int(rng.integers(len(batch.parent)))
    start, stop = batch.cu_seqlens[segment : segment + 2].tolist()
    poisoned = rows.copy()
    poisoned[start] = np.nan
    got, after = run_layer(batch, NET, weights, poisoned, slots)
    sees = visible_rows(batch)[:, start]
    assert np.isnan(got[sees]).all()
    outside = ~sees & ((np.arange(len(rows)) < start) | (np.arange(len(rows)) >= stop))
    assert outside.any()
    np.testing.assert_array_equal(got[outside], expected[outside])
    clean = [slot for row, slot in states_of(batch) if outside[row]]
    for side, expected in zip(after, kept, strict=True):
        np.testing.assert_array_equal(side[clean], expected[clean])


@pytest.fixture
def backend(shared_backends):
    return shared_backends.get("torch", "qwen3_5", dtype="float32", max_batch_tokens=512)


def test_a_prefix_without_a_state_is_refused(backend):
    batch = pack(item_segments([[1, 2]], 20, 0, -1, LABELS), [Prefix(20, int32([0, 1]))])
    with pytest.raises(ValueError, match="prefix of 20 tokens has no state"):
        backend.collect(backend.extend(batch))


@pytest.mark.parametrize("cached", [False, True])
def test_isolation_is_exact(backend, cached):
    """With unchanged shapes, another item or request changes not a single bit, nor does another
    state."""
    rng, size, cut = np.random.default_rng(1), backend.limits.page_size, 70
    query, stranger = random_ids(rng, cut), random_ids(rng, 21)
    items = [random_ids(rng, n) for n in (5, 20, 20, 1, 33)]
    pages = Pages.shuffled(rng, 64, size).of(0, cut)
    slots = page_slots(pages, 0, cut, size)
    first = Segment(int32(query), 0, 0, slots=slots, states=[(cut, 5)])
    backend.collect(backend.extend(pack([first], [Prefix(0, pages)])))

    def score(items, stranger, guest):
        prefixes = [Prefix(cut, pages, 5) if cached else Prefix(0, pages), Prefix(0, NO_PAGES)]
        own = [] if cached else [Segment(int32(query), 0, 0)]
        segments = [*own, *item_segments(items, cut, 0, -1 if cached else 0, LABELS)]
        parent = len(segments)
        segments.append(Segment(int32(stranger), 0, 1, states=[(8, 3), (21, 4)]))
        segments += item_segments([guest], len(stranger), 1, parent, LABELS)
        scores = backend.collect(backend.extend(pack(segments, prefixes)))
        return np.column_stack([scores.label_logits.reshape(-1, len(LABELS)), scores.lse])

    base = score(items, stranger, random_ids(rng, 9))
    for changed in range(len(items)):
        other = list(items)
        other[changed] = random_ids(rng, len(items[changed]))
        moved = score(other, random_ids(rng, len(stranger)), random_ids(rng, 9))
        same = [i for i in range(len(items)) if i != changed]
        assert np.array_equal(moved[same], base[same]), f"item {changed} leaks"
        assert not np.array_equal(moved[changed], base[changed])
        assert not np.array_equal(moved[-1], base[-1])


# ---- defects ----


def worst_error(tiny_model):
    """Return max |delta log p| of a query in chunks and its items, beside another request's, cold,
    then with the cached state, and then of a longer query that begins with it."""
    directory, model = tiny_model("qwen3_5")
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 75), [random_ids(rng, n) for n in (3, 9, 1, 20, 33, 70)]
    longer = query + random_ids(rng, 30)
    errors = []
    with Scorer(str(directory), max_batch_tokens=64) as scorer:
        for prompt in (query, query, longer):
            expected = reference_logprobs(model, [prompt + item for item in items])[:, LABELS]
            result = scorer.score(prompt, items, label_token_ids=LABELS, logprobs=True)
            errors.append(np.abs(result.logprobs - expected).max())
    return max(errors)


def test_without_a_defect(tiny_model):
    assert worst_error(tiny_model) < 1e-4


def changed(monkeypatch, owner, name, change):
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))


def a_state_leaks_to_a_sibling(monkeypatch):
    """Every segment begins where the segment before it in the batch ended."""

    def chained(make):
        def tables(batch, *sizes):
            made = make(replace(batch, parent=np.arange(-1, len(batch.parent) - 1)), *sizes)
            return [*make(batch, *sizes)[:2], *made[2:]]

        return tables

    changed(monkeypatch, layout, "lay_out_states", chained)


def the_decay_is_dropped(monkeypatch):
    def dropped(run):
        return lambda linear, index, w, x: run(linear, index, replace(w, decay=w.decay * 0), x)

    changed(monkeypatch, DeltaNetPass, "run", dropped)


def the_convolution_does_not_see_the_parent(monkeypatch):
    def blind(make):
        def tables(batch, *sizes):
            places, *others = make(batch, *sizes)
            first = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
            places[places < first[:, None]] = -1
            return [places, *others]

        return tables

    changed(monkeypatch, layout, "lay_out_states", blind)


def a_chunk_keeps_the_state_before_its_last_row(monkeypatch):
    def early(kept):
        def states(job, start, stop, size):
            return [(max(1, at - 1), slot) for at, slot in kept(job, start, stop, size)]

        return states

    changed(monkeypatch, jobs.Job, "kept_states", early)


PLANTS = (
    a_state_leaks_to_a_sibling,
    the_decay_is_dropped,
    the_convolution_does_not_see_the_parent,
    a_chunk_keeps_the_state_before_its_last_row,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_defect_is_visible(tiny_model, monkeypatch, plant):
    monkeypatch.setattr(
        torch_backend, "check_start", lambda *_: None
    )  # it would refuse most of them
    plant(monkeypatch)
    assert worst_error(tiny_model) > VISIBLE
