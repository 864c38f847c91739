"""Promise: every backend keeps the contract with the engine; the same tests run on each of them.

The reference is transformers, with every prompt alone.
"""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore.backends.torch.ranks.backend import ParallelBackend
from gpuscore.types.batch import Prefix, Rows, Segment, pack, page_slots
from support.backends import JAX_FAMILIES, fill_pages, needs_cuda, needs_jax
from support.batches import (
    NO_PAGES,
    Pages,
    in_one_batch,
    int32,
    item_segments,
    query_chunks,
)
from support.models import random_ids, reference_logprobs
from support.slow import slow

LABELS = [3, 17, 399]
TOLERANCE = 1e-4


@pytest.fixture
def rng():
    return np.random.default_rng(1)


# On a CUDA device the backend is warm, so that small batches run as graphs.
ON_CUDA = {"device": "cuda", "warm": True, "cuda_graph_tokens": 256, "kv_cache_size": 2**27}

IN_RANKS = {"device": "cpu", "tensor_parallel": 2, "max_batch_tokens": 512}


@pytest.fixture(
    params=[
        "torch",
        "ranks",
        pytest.param("jax", marks=needs_jax),
        pytest.param("cuda", marks=[needs_cuda, pytest.mark.gpu]),
    ]
)
def make_backend(request, shared_backends):
    def make(dtype="float32", family="qwen3"):
        if request.param == "cuda":
            return shared_backends.get("torch", family, dtype=dtype, **ON_CUDA)
        if request.param == "ranks":
            if (family, dtype) != ("qwen3", "float32"):
                pytest.skip("a start of two ranks takes seconds; test_tensor_parallel has others")
            return shared_backends.get("torch", family, dtype=dtype, **IN_RANKS)
        if request.param == "jax" and family not in JAX_FAMILIES:
            pytest.skip(f"--backend jax refuses {family}, which test_jax holds")
        return shared_backends.get(
            request.param, family, dtype=dtype, device="cpu", max_batch_tokens=512
        )

    return make


def run(backend, batch):
    return backend.collect(backend.extend(batch))


def logprobs(scores):
    return scores.label_logits.reshape(-1, len(LABELS)) - scores.lse[:, None]


def close_to(scores, expected):
    np.testing.assert_allclose(logprobs(scores), expected[:, LABELS], atol=TOLERANCE, rtol=0)


def test_any_layout_gives_the_same_scores(make_backend, tiny_model, rng):
    """Layouts: all in one batch; the query cached whole or in chunks; a part cached, a part as
    parent."""
    backend = make_backend()
    query, items = random_ids(rng, 45), [random_ids(rng, n) for n in (1, 2, 7, 20, 63, 7)]
    expected = reference_logprobs(tiny_model()[1], [query + item for item in items])
    close_to(run(backend, in_one_batch(query, items, LABELS)), expected)
    size = backend.limits.page_size
    for request, bounds in enumerate(([45], [16, 45], [1, 2, 30, 45])):
        pages = Pages.shuffled(rng, 64, size).of(request, 45)
        for chunk in query_chunks(query, bounds, pages, size):
            assert len(run(backend, chunk).label_logits) == 0, "a query-only batch scores nothing"
        cached = pack(item_segments(items, 45, 0, -1, LABELS), [Prefix(45, pages)])
        close_to(run(backend, cached), expected)
        cut = 17
        tail = Segment(int32(query[cut:]), cut, 0, slots=page_slots(pages, cut, 45, size))
        partly = pack([tail, *item_segments(items, 45, 0, 0, LABELS)], [Prefix(cut, pages)])
        close_to(run(backend, partly), expected)


TREE = [-1, 0, 1, 2, 3, 2, 0, -1, 7, 7]  # parents; five segments below one another


@pytest.mark.parametrize("cached", [0, 17, 45])
def test_segments_form_trees(make_backend, tiny_model, rng, cached):
    """The query is the root of the first and the last tree, or a cached prefix, or both."""
    backend = make_backend()
    size, query = backend.limits.page_size, random_ids(rng, 45)
    pages = Pages.shuffled(rng, 64, size).of(0, 45)
    for chunk in query_chunks(query, [cached], pages, size) if cached else ():
        run(backend, chunk)
    segments = [Segment(int32(query[cached:]), cached, 0)] if cached < 45 else []
    shift, prompts = len(segments), []
    for parent, length in zip(TREE, (20, 1, 3, 1, 40, 2, 5, 7, 1, 1), strict=True):
        above = prompts[parent] if parent >= 0 else query
        prompts.append(above + random_ids(rng, length))
        place = parent + shift if parent >= 0 else shift - 1
        segments += item_segments([prompts[-1][len(above) :]], len(above), 0, place, LABELS)
    batch = pack(segments, [Prefix(cached, pages)])
    close_to(run(backend, batch), reference_logprobs(tiny_model()[1], prompts))


def test_requests_share_a_batch(make_backend, tiny_model, rng):
    backend, size = make_backend(), make_backend().limits.page_size
    pages = Pages.shuffled(rng, 64, size)
    segments, prefixes, prompts = [], [], []
    for request, length in enumerate((0, 1, 40, 64)):
        query, items = random_ids(rng, length), [random_ids(rng, n) for n in (3, 1, 11)]
        own = pages.of(request, length)
        if length and request % 2:
            for chunk in query_chunks(query, [length], own, size):
                run(backend, chunk)
            prefixes.append(Prefix(length, own))
            segments += item_segments(items, length, request, -1, LABELS)
        else:
            prefixes.append(Prefix(0, NO_PAGES))
            parent = len(segments) if length else -1
            segments += [Segment(int32(query), 0, request)] if length else []
            segments += item_segments(items, length, request, parent, LABELS)
        prompts += [query + item for item in items]
    expected = reference_logprobs(tiny_model()[1], prompts)
    close_to(run(backend, pack(segments, prefixes)), expected)


@pytest.mark.parametrize(
    ("family", "dtype", "cached"),
    [
        *(("qwen3", "float32", cached) for cached in (False, True)),
        *((family, "float32", False) for family in ("gemma2", "gemma3")),
        ("qwen3", "bfloat16", False),
        *slow(*(("qwen3", "float16", cached) for cached in (False, True))),
        *slow(*((family, "float32", True) for family in ("gemma2", "gemma3"))),
    ],
)
def test_isolation_is_exact(make_backend, rng, family, dtype, cached):
    """Invariant 2: with unchanged shapes, another item or request changes not a single bit.

    A mixture of experts, whose rows per expert do change, keeps it with --deterministic
    (test_deterministic).
    """
    backend = make_backend(dtype, family)
    size, cut = backend.limits.page_size, 37
    query = random_ids(rng, cut)
    items = [random_ids(rng, n) for n in (5, 20, 20, 1, 33)]
    stranger, guest = random_ids(rng, 21), [random_ids(rng, 9)]
    pages = Pages.shuffled(rng, 64, size).of(0, cut)
    if cached:
        for chunk in query_chunks(query, [cut], pages, size):
            run(backend, chunk)

    def score(items, stranger, guest):
        prefixes = [Prefix(cut if cached else 0, pages), Prefix(0, NO_PAGES)]
        own = [] if cached else [Segment(int32(query), 0, 0)]
        segments = [*own, *item_segments(items, cut, 0, -1 if cached else 0, LABELS)]
        parent = len(segments)
        segments.append(Segment(int32(stranger), 0, 1))
        segments += item_segments(guest, len(stranger), 1, parent, LABELS)
        scores = run(backend, pack(segments, prefixes))
        return np.column_stack([scores.label_logits.reshape(-1, len(LABELS)), scores.lse])

    base = score(items, stranger, guest)
    for changed in (0, 2, 4):  # the first, one of two as long, the last
        other = list(items)
        other[changed] = random_ids(rng, len(items[changed]))
        moved = score(other, random_ids(rng, len(stranger)), [random_ids(rng, 9)])
        same = [i for i in range(len(items)) if i != changed]
        assert np.array_equal(moved[same], base[same]), f"item {changed} leaks"
        assert not np.array_equal(moved[changed], base[changed])
        assert not np.array_equal(moved[-1], base[-1])


def test_poisoned_memory_changes_nothing(make_backend, rng):
    """NaN fills every slot that is not this request's own, page tails included."""
    backend, size = make_backend(), make_backend().limits.page_size
    cut = 2 * size + 3
    query, items = random_ids(rng, cut), [random_ids(rng, n) for n in (4, 19)]
    pages = Pages.shuffled(rng, 64, size).of(3, cut)
    outcomes = []
    for value in (0.0, np.nan):
        fill_pages(backend, value)
        for chunk in query_chunks(query, [size, cut], pages, size):
            run(backend, chunk)
        scores = run(backend, pack(item_segments(items, cut, 0, -1, LABELS), [Prefix(cut, pages)]))
        outcomes.append(np.append(scores.label_logits, scores.lse))
    assert np.isfinite(outcomes[0]).all()
    assert np.array_equal(*outcomes)


def test_ragged_labels_lse_and_top(make_backend, tiny_model, rng):
    backend = make_backend()
    items = [random_ids(rng, n) for n in (4, 9, 1)]
    segments = [
        Segment(int32(items[0]), 0, 0, label_ids=int32([5]), need_lse=True),
        Segment(int32(items[1]), 0, 0, label_ids=int32([399, 0, 5, 5])),
        Segment(int32(items[2]), 0, 0, label_ids=int32([1, 2]), need_lse=True),
    ]
    expected = reference_logprobs(tiny_model()[1], items)
    batch = pack(segments, [Prefix(0, NO_PAGES)])
    scores = run(backend, batch)
    assert scores.top_ids is None
    assert scores.top_logits is None
    assert np.isnan(scores.lse).tolist() == [False, True, False]
    np.testing.assert_allclose(
        scores.label_logits[0] - scores.lse[0], expected[0, 5], atol=TOLERANCE
    )
    np.testing.assert_allclose(
        scores.label_logits[5:] - scores.lse[2], expected[2, [1, 2]], atol=TOLERANCE
    )
    row = scores.label_logits[1:5]
    np.testing.assert_allclose(
        row - row[0], expected[1, [399, 0, 5, 5]] - expected[1, 399], atol=TOLERANCE
    )

    for num_top in (1, 3, 20):
        top = run(backend, replace(batch, num_top=num_top))
        order = np.argsort(-expected, axis=1, kind="stable")[:, :num_top]
        np.testing.assert_array_equal(top.top_ids, order)
        best = (top.top_logits - scores.lse[:, None])[[0, 2]]
        ranked = np.take_along_axis(expected, order, axis=1)[[0, 2]]
        np.testing.assert_allclose(best, ranked, atol=TOLERANCE)
    none = run(backend, replace(batch, need_lse=np.zeros(3, dtype=bool)))
    assert none.lse is None
    assert np.array_equal(none.label_logits, scores.label_logits)


def test_every_row_of_a_segment_can_be_scored(make_backend, tiny_model, rng):
    """Every row is scored for its next token: a prompt in two chunks, beside a short one and other
    items."""
    backend, size = make_backend(), make_backend().limits.page_size
    long, short, other = random_ids(rng, 63), random_ids(rng, 5), random_ids(rng, 7)
    pages = Pages.shuffled(rng, 64, size).of(2, 40)
    scored = []
    for start, stop in ((0, 40), (40, 63)):
        slots = page_slots(pages, start, stop, size) if stop < 63 else None
        labels = int32([*long[1:], 0][start:stop])
        every = {"need_lse": True, "rows": Rows.every(labels)}
        chunk = Segment(int32(long[start:stop]), start, 0, slots=slots, **every)
        every["rows"] = Rows.every(int32([*short[1:], 0]))
        beside = Segment(int32(short), 0, 1, **every)
        segments = [*item_segments([other], 0, 1, -1, LABELS[:1]), chunk, beside]
        batch = pack(segments, [Prefix(start, pages), Prefix(0, NO_PAGES)], num_top=1)
        scored.append(run(backend, batch))
    expected = [
        reference_logprobs(tiny_model()[1], [prompt[: n + 1] for n in range(len(prompt))])
        for prompt in (long, short, other)
    ]
    for scores, rows in zip(scored, (slice(0, 40), slice(40, 63)), strict=True):
        every = np.concatenate([expected[2][-1:], expected[0][rows], expected[1]])
        labels = [LABELS[0], *[*long[1:], 0][rows], *short[1:], 0]
        got = scores.label_logits - scores.lse
        np.testing.assert_allclose(got, every[np.arange(len(every)), labels], atol=TOLERANCE)
        np.testing.assert_array_equal(scores.top_ids[:, 0], every.argmax(axis=1))
        got = scores.top_logits[:, 0] - scores.lse
        np.testing.assert_allclose(got, every.max(axis=1), atol=TOLERANCE, rtol=0)


def test_a_failed_batch_does_not_harm_the_next(make_backend, rng):
    backend = make_backend()
    if isinstance(backend, ParallelBackend):
        pytest.skip("a failure in the middle of a batch ends all ranks")
    good = in_one_batch(random_ids(rng, 9), [random_ids(rng, 4)], LABELS)
    before = run(backend, good)
    with pytest.raises(Exception):  # noqa: B017, PT011  (at the launch, or when it is collected)
        backend.collect(backend.extend(replace(good, label_token_ids=None)))
    assert np.array_equal(run(backend, good).label_logits, before.label_logits)


def test_limits_are_usable(make_backend):
    backend = make_backend()
    limits = backend.limits
    assert limits.page_size * limits.num_pages >= limits.max_model_len
    assert limits.vocab_rows == 400
    backend.warmup()
