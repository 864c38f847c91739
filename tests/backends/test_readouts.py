"""Promise: each score of an item that has several equals transformers' for the prompt that ends
there, however the item is cut, packed and cached, and whatever other items there are."""

from copy import deepcopy
from dataclasses import replace as changed
from functools import cache

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig, RequestLimits
from gpuscore.engine import runner
from gpuscore.engine.engine import Engine
from gpuscore.engine.plan import plan_items
from gpuscore.errors import InvalidRequest
from gpuscore.text import joining
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.readouts import Candidates, by_prompt, request_of
from gpuscore.text.score_input import PromptChecks, ScoreInput
from support.backends import needs_jax
from support.models import random_ids

MARK, LABELS, CONTEXT = 391, [3, 17, 399], 1024
SEQUENCES = [[12, 7, 5], [12, 8], [9], [12], [7, 7]]


def words(rng, count):
    return [5 if id == MARK else id for id in random_ids(rng, count)]


def sets(rng):
    """Return items with their token first and last, adjacent, once, 300 times, again, and with a
    common beginning."""
    ends = [MARK, *words(rng, 33), MARK, MARK, *words(rng, 20), MARK]
    many = words(rng, 320)
    for place in rng.choice(320, 300, replace=False):
        many[place] = MARK
    return [ends, [*words(rng, 7), MARK, 9], many, list(ends), [*ends[:50], MARK, *words(rng, 9)]]


@pytest.fixture
def rng():
    return np.random.default_rng(4)


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    made = {}

    def get(family="qwen3", **options):
        key = repr((family, sorted(options.items())))
        if key not in made:
            directory, _ = tiny_model(family, max_position_embeddings=CONTEXT)
            compiled = {} if options.get("backend") == "jax" else {"compile": "off"}
            config = ModelConfig(str(directory), dtype="float32", **compiled, **options)
            made[key] = Engine(create_backend(plan_backend(directory, config)))
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


def asked(engine, query, items, **fields):
    if not {"label_token_ids", "label_sequences"} & fields.keys():
        fields["label_token_ids"] = LABELS
    inputs = ScoreInput(query, items, extraction=MARK, **fields)
    return PromptBuilder(None, engine.limits, RequestLimits()).build(inputs)


def scored(engine, request):
    """Return the log-probabilities of each item's rows, [rows, labels] each."""
    result = engine.score(request).result(120)
    starts, rows = request.first_rows, []
    for number, logits in enumerate(result.label_logits):
        own = slice(starts[number], starts[number + 1])
        table = logits.reshape(own.stop - own.start, -1).astype(np.float64)
        rows.append(table - result.lse[own, None])
    return rows


def distributions(model, prompt):
    """Return transformers' log-probabilities after every token of a prompt, in float64: its own
    float32 is off by 1e-4 after hundreds of tokens of a linear layer."""
    return distributions_of(doubled(model), tuple(prompt))


@cache
def distributions_of(model, prompt):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        if "Sequence" in type(model).__name__:
            logits = model.score(model.model(ids).last_hidden_state)[0]
        else:
            logits = model(ids).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


@cache
def doubled(model):
    return deepcopy(model).double()


def places(query, item):
    return [len(query) + place for place, id in enumerate(item) if id == MARK]


def check(model, query, items, rows, labels=LABELS):
    per_item = labels if isinstance(labels[0], list) else [labels] * len(items)
    for item, got, ids in zip(items, rows, per_item, strict=True):
        expected = distributions(model, query + item)[places(query, item)][:, ids]
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


KINDS = [
    *(("torch", "qwen3", LABELS, size) for size in (49, 1500)),
    ("torch", "qwen3_5", LABELS, 49),
    ("torch", "llama_classes", [0, 1, 2], 1500),
    ("torch", "gemma2_tokens", [2, 0, 1], 49),
    ("torch", "qwen2_prm", [1, 0], 1500),
    pytest.param("jax", "qwen3", LABELS, 49, marks=needs_jax),
    pytest.param("jax", "llama_tokens", [0, 1, 2], 49, marks=needs_jax),
]


@pytest.mark.parametrize(("backend", "family", "labels", "max_batch_tokens"), KINDS)
def test_as_transformers(engine_of, tiny_model, rng, backend, family, labels, max_batch_tokens):
    """With a cold cache, a prefix hit and another salt; together, alone, with an empty query."""
    engine = engine_of(family, backend=backend, max_batch_tokens=max_batch_tokens)
    _, model = tiny_model(family, max_position_embeddings=CONTEXT)
    query, items = words(rng, 67), sets(rng)
    cases = (("", items), ("", items), ("", items[2:3]), ("", items[1:2]), ("other", items))
    for salt, some in cases:
        request = asked(engine, query, some, label_token_ids=labels)
        rows = scored(engine, replace(request, salt=salt))
        check(model, query, some, rows, labels)
    rows = scored(engine, asked(engine, [], items[:2], label_token_ids=labels))
    check(model, [], items[:2], rows, labels)


def test_each_item_has_labels_of_its_own(engine_of, tiny_model, rng):
    engine, (_, model) = (
        engine_of(max_batch_tokens=49),
        tiny_model("qwen3", max_position_embeddings=CONTEXT),
    )
    query, items = words(rng, 20), sets(rng)
    labels = [random_ids(rng, 1 + n) for n in range(len(items))]
    request = asked(engine, query, items, label_token_ids=labels)
    check(model, query, items, scored(engine, request), labels)


@pytest.mark.parametrize(
    ("backend", "max_batch_tokens"),
    [("torch", 49), ("torch", 1500), pytest.param("jax", 49, marks=needs_jax)],
)
def test_labels_of_several_tokens(engine_of, tiny_model, rng, backend, max_batch_tokens):
    """They continue each occurrence: as a chain, or as whole prompts if that does not fit."""
    engine = engine_of(backend=backend, max_batch_tokens=max_batch_tokens)
    _, model = tiny_model("qwen3", max_position_embeddings=CONTEXT)
    query, items = words(rng, 30), [items for items in sets(rng) if len(items) < 100]
    request = asked(engine, query, items, label_sequences=SEQUENCES)
    for got, item in zip(scored(engine, request), items, strict=True):
        for row, place in zip(got, places(query, item), strict=True):
            start = (query + item)[: place + 1]
            after = [distributions(model, start + label) for label in SEQUENCES]
            sums = [
                table[place : place + len(label)][range(len(label)), label].sum()
                for table, label in zip(after, SEQUENCES, strict=True)
            ]
            np.testing.assert_allclose(row, sums, atol=1e-4, rtol=0)
    if max_batch_tokens == 1500:  # an item once, for all its occurrences
        cold = engine.score(replace(request, salt="cold")).result(60)
        assert cold.computed_tokens == 30 + 57 + 8 + 51


def test_many_requests_at_once(engine_of, tiny_model, rng):
    engine, (_, model) = (
        engine_of(max_batch_tokens=700),
        tiny_model("qwen3", max_position_embeddings=CONTEXT),
    )
    queries, items = [words(rng, 5 * (n % 4)) for n in range(24)], sets(rng)
    requests = [asked(engine, query, items[n % 5 : n % 5 + 2]) for n, query in enumerate(queries)]
    futures = engine.score_all(requests)
    for n, (query, request, future) in enumerate(zip(queries, requests, futures, strict=True)):
        result = future.result(120)
        rows = [row.reshape(-1, 3) for row in result.label_logits]
        flat = np.concatenate(rows) - result.lse[:, None]
        got = np.split(flat, np.cumsum([*map(len, rows)])[:-1])
        check(model, query, items[n % 5 : n % 5 + 2], got)
        assert request.num_rows == len(flat)


@pytest.mark.parametrize(("family", "labels"), [("qwen3", LABELS), ("qwen2_prm", [1, 0])])
def test_ranks(engine_of, tiny_model, rng, family, labels):
    """Two ranks share a vocabulary; each has the whole of a head over classes."""
    engine = engine_of(family, device="cpu", tensor_parallel=2, max_batch_tokens=200)
    _, model = tiny_model(family, max_position_embeddings=CONTEXT)
    query, items = words(rng, 67), sets(rng)
    request = asked(engine, query, items, label_token_ids=labels)
    check(model, query, items, scored(engine, request), labels)


def test_after_eviction(engine_of, tiny_model, rng):
    """Pages whose rows were kept are given to others, and computed again."""
    engine = engine_of(max_batch_tokens=300, kv_cache_size=2**20)
    _, model = tiny_model("qwen3", max_position_embeddings=CONTEXT)
    query, items = words(rng, 300), sets(rng)[:2]
    prompt = np.array(words(rng, 200), np.int32)
    ids = [random_ids(rng, 1 + n % 3) for n in range(199)]
    request, whole = asked(engine, query, items), candidates(engine, [prompt], ids)
    known = distributions(model, prompt.tolist())
    computed = []
    for _ in range(2):
        for _ in range(2):
            computed.append([engine.score(r).result(120).computed_tokens for r in (request, whole)])
            check(model, query, items, scored(engine, request))
            (rows,) = found(engine, [prompt], whole)
            for row, own, expected in zip(rows, ids, known, strict=False):
                np.testing.assert_allclose(row, expected[own], atol=1e-4, rtol=0)
        for _ in range(4):
            others = asked(engine, words(rng, 900), [[5, MARK]])
            engine.score(others).result(120)
    assert computed[0] == computed[2], "all is computed again"
    assert computed[1] == computed[3]
    assert min(cold - warm for cold, warm in zip(*computed[:2], strict=True)) > 100


def candidates(engine, prompts, ids, start=0):
    """Return a request for candidates after the tokens of prompts."""
    chosen = Candidates.read(ids, start, prompts, PromptChecks(engine.limits))
    return request_of(prompts, chosen, engine.limits)


def found(engine, prompts, request, start=0):
    answered = zip(by_prompt(request, engine.score(request).result(120)), prompts, strict=True)
    return [[*rows.candidates(len(prompt) - 1 - start)] for rows, prompt in answered]


def test_bits_of_candidates_do_not_depend_on_other_prompts(engine_of, rng):
    whole = engine_of(deterministic=True, max_batch_tokens=600)
    small = engine_of(deterministic=True, max_batch_tokens=150)
    begin, ids = words(rng, 150), random_ids(rng, 64)
    prompts = [np.array(begin + words(rng, n), np.int32) for n in (1, 40, 190)]
    together = found(whole, prompts, candidates(whole, prompts, ids, 100), 100)
    for engine in (whole, small):
        for prompt, rows in zip(prompts, together, strict=True):
            for _ in range(2):  # cold and cached
                alone = found(engine, [prompt], candidates(engine, [prompt], ids, 100), 100)
                np.testing.assert_array_equal(alone[0], rows)


def test_bits_do_not_depend_on_other_items(engine_of, rng):
    whole = engine_of(deterministic=True, max_batch_tokens=600)
    small = engine_of(deterministic=True, max_batch_tokens=150)
    query, items = words(rng, 30), sets(rng)[:3]
    together = scored(whole, asked(whole, query, items))
    for engine in (whole, small):
        for number, item in enumerate(items):
            (alone,) = scored(engine, asked(engine, query, [item]))
            np.testing.assert_array_equal(alone, together[number])


def test_shared_beginnings_and_equal_items_are_computed_once(engine_of, rng):
    engine = engine_of(max_batch_tokens=1500)
    start = [*words(rng, 40), MARK, *words(rng, 40)]
    items = [[*start, *words(rng, 5), MARK] for _ in range(3)]
    query = words(rng, 10)
    request = asked(engine, query, [*items, *items, [MARK, *words(rng, 3)]])
    plan = plan_items(request, engine.limits)
    assert plan.num_tokens == 10 + 81 + 3 * 6 + 4
    shared = [read for read in plan.reads if read.places.tolist() == [40]]
    assert len(shared) == 1, "the beginning's row is computed once"


def a_row_too_early(monkeypatch):
    read_at = joining.read_at

    def shifted(*given):
        *rest, read = read_at(*given)
        first, *items = read.places
        moved = (np.maximum(places - 1, np.arange(len(places))) for places in items)
        return *rest, replace(read, places=(first, *map(np.int32, moved)))

    monkeypatch.setattr(joining, "read_at", shifted)


def labels_of_the_next_row(monkeypatch):
    build = runner.build_batch

    def rolled(*given):
        batch = build(*given)
        return changed(batch, label_token_ids=np.roll(batch.label_token_ids, 1))

    monkeypatch.setattr(runner, "build_batch", rolled)


def rows_of_the_query(monkeypatch):
    build = runner.build_batch

    def earlier(*given):
        batch = build(*given)
        return changed(batch, score_rows=np.minimum(batch.score_rows, batch.cu_seqlens[1] - 1))

    monkeypatch.setattr(runner, "build_batch", earlier)


@pytest.mark.parametrize("plant", [a_row_too_early, labels_of_the_next_row, rows_of_the_query])
def test_a_defect_is_seen(engine_of, tiny_model, rng, monkeypatch, plant):
    engine, (_, model) = (
        engine_of(max_batch_tokens=1500),
        tiny_model("qwen3", max_position_embeddings=CONTEXT),
    )
    query, items = words(rng, 67), [[5, *item] for item in sets(rng)]
    check(model, query, items, scored(engine, asked(engine, query, items)))
    plant(monkeypatch)
    request = replace(asked(engine, query, items), salt="other")
    with pytest.raises(AssertionError, match="Not equal"):
        check(model, query, items, scored(engine, request))


def test_scorer(tiny_model, rng):
    """Rows of all items are one table with offsets; given tokens at given rows are arrays."""
    directory, model = tiny_model("qwen3", max_position_embeddings=CONTEXT)
    query, items = words(rng, 20), [item for item in sets(rng) if len(item) < 100]
    prompt, ragged = words(rng, 40), [random_ids(rng, n % 4) for n in range(30)]
    with Scorer(str(directory), dtype="float32", compile="off") as scorer:
        options = {"label_token_ids": LABELS, "extraction_token_id": MARK, "logprobs": True}
        got = scorer.score(query, [*items, [5], items[0]], on_error="null", **options)
        same = scorer.logprobs(prompt, [3, 9])
        own = scorer.logprobs(np.array(prompt), iter(ragged), start=9)
        nothing = scorer.score(query, [], **options)
        with pytest.raises(InvalidRequest, match="30 lists for 39 rows"):
            scorer.logprobs(prompt, ragged)
    assert [(error.index, error.code) for error in got.errors] == [(4, "no_extraction_token")]
    assert np.diff(got.offsets).tolist() == [4, 1, 4, 4, 0, 4]
    rows = np.split(got.logprobs, got.offsets[1:-1])
    check(model, query, [*items, items[0]], [*rows[:4], rows[5]])
    np.testing.assert_allclose(got.scores, np.exp(got.logprobs), rtol=1e-12)
    np.testing.assert_allclose(got.label_mass, got.scores.sum(axis=1), rtol=1e-12)
    assert (nothing.offsets.tolist(), nothing.scores.shape) == ([0], (0, 0))
    expected = distributions(model, prompt)[:-1]
    np.testing.assert_allclose(same, expected[:, [3, 9]], atol=1e-4, rtol=0)
    for array, ids, row in zip(own, ragged, expected[9:], strict=True):
        np.testing.assert_allclose(array, row[ids], atol=1e-4, rtol=0)
