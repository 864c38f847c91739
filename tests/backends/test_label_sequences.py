"""Promise: a label of several tokens gets the log-probability that transformers gives the
continuation alone, within 1e-4 in float32, and every defect planted on purpose is seen."""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.engine.plan import plan_items
from gpuscore.types.request import LabelTrie
from support.backends import JAX_FAMILIES, needs_jax
from support.models import FAMILIES, random_ids, reference_logprobs
from support.slow import slow

TOLERANCE, VISIBLE = 1e-4, 1e-2
# Mixed lengths, shared first tokens, a label that begins another, one that is there twice.
LABELS = [[12, 7, 5], [12, 8], [9], [12], [3, 3, 3, 250, 8], [9], [12, 7, 399]]
COUNTED = [2, 3, 4]
SOME = ("qwen3", "gemma3", "qwen3_5")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def continuations(model, prompts, labels=LABELS):
    """Return transformers' log-probabilities [N, L], each prompt and beginning of a label alone."""
    rows = []
    for prompt in prompts:
        row = []
        for label in labels:
            before = [prompt + label[:n] for n in range(len(label))]
            logprobs = reference_logprobs(model, before)
            row.append(sum(logprobs[n, token] for n, token in enumerate(label)))
        rows.append(row)
    return np.array(rows)


def near(got, expected):
    assert expected.std() > 1, "near-uniform outputs would prove nothing"
    # The sum of a label's tokens has a float32's precision: at -52, one step is 4e-6.
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=4e-6)


def check(model, scorer, query, items, **options):
    prompts = [i + query if options.get("item_first") else query + i for i in items]
    expected = continuations(model, prompts)
    result = scorer.score(query, items, label_sequences=LABELS, logprobs=True, **options)
    near(result.logprobs, expected)
    np.testing.assert_allclose(result.scores, np.exp(expected), atol=TOLERANCE, rtol=0)
    mass = np.exp(expected[:, COUNTED]).sum(axis=1)
    np.testing.assert_allclose(result.label_mass, mass, atol=TOLERANCE, rtol=0)
    assert result.prompt_tokens == sum(map(len, prompts)), "labels are no prompt"
    return result


# 24 tokens: less than the query and some items have; 61: between; 512: everything in one batch.
@pytest.mark.parametrize("max_batch_tokens", [24, *slow(61, 512)])
@pytest.mark.parametrize("family", [*SOME, *slow(*sorted(set(FAMILIES) - {*SOME}))])
def test_as_transformers(tiny_model, family, rng, max_batch_tokens):
    directory, model = tiny_model(family)
    query = random_ids(rng, 67)
    items = [random_ids(rng, n) for n in (1, 2, 20, 41)]
    with Scorer(str(directory), max_batch_tokens=max_batch_tokens) as scorer:
        cold = check(model, scorer, query, items)
        check(model, scorer, query, items[-1:])
        warm = check(model, scorer, query, items)
        assert warm.cached_tokens > cold.cached_tokens
        check(model, scorer, query, items, item_first=True)
        check(model, scorer, [], items)


@needs_jax
@pytest.mark.parametrize("family", [JAX_FAMILIES[0], *slow(*JAX_FAMILIES[1:])])
def test_on_jax(tiny_model, family, rng):
    directory, model = tiny_model(family)
    query, items = random_ids(rng, 45), [random_ids(rng, n) for n in (1, 20, 70)]
    with Scorer(str(directory), backend="jax", dtype="float32", max_batch_tokens=64) as scorer:
        check(model, scorer, query, items)
        check(model, scorer, query, items, item_first=True)


def test_deterministic_mode_gives_the_same_bits_alone_and_in_company(tiny_model, rng):
    directory, model = tiny_model()
    query, items = random_ids(rng, 67), [random_ids(rng, n) for n in (1, 9, 30)]
    how = {"deterministic": True, "compile": "on"}
    with Scorer(str(directory), **how, max_batch_tokens=128) as scorer:
        together = check(model, scorer, query, items)
        for index, item in enumerate(items):
            alone = check(model, scorer, query, [item])
            np.testing.assert_array_equal(alone.logprobs[0], together.logprobs[index])


def test_temperature_and_length(tiny_model, rng):
    directory, model = tiny_model()
    query, items = random_ids(rng, 20), [random_ids(rng, 4), random_ids(rng, 7)]
    expected = continuations(model, [query + item for item in items])
    lengths = [*map(len, LABELS)]
    with Scorer(str(directory), max_batch_tokens=512) as scorer:

        def scores(**options):
            result = scorer.score(query, items, label_sequences=LABELS, **options)
            assert result.logprobs is None
            return result.scores

        def softmax(values):
            weights = np.exp(values)
            return weights / weights.sum(axis=1, keepdims=True)

        close = {"atol": TOLERANCE, "rtol": 0}
        warm = {"apply_softmax": True, "temperature": 2.5}
        mean = {"label_length_normalization": "mean"}
        np.testing.assert_allclose(scores(apply_softmax=True), softmax(expected), **close)
        np.testing.assert_allclose(scores(**warm), softmax(expected / 2.5), **close)
        np.testing.assert_allclose(scores(**mean), np.exp(expected / lengths), **close)
        np.testing.assert_allclose(
            scores(**warm, **mean), softmax(expected / lengths / 2.5), **close
        )
        plain = scorer.score(query, items, label_sequences=LABELS, logprobs=True, **mean)
        near(plain.logprobs, expected)


def test_texts_are_tokenised_on_their_own(tiny_model, rng):
    directory, model = tiny_model("llama")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = ["yes", "no way", "n", "café ☃"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert {1} < {*map(len, ids)}
    query, items = "query: a blue wooden chair", [" for the gar", "den"]
    prompts = [tokenizer.encode(query + item).ids for item in items]
    with Scorer(str(directory), max_batch_tokens=512) as scorer:
        result = scorer.score(query, items, labels=texts, logprobs=True)
    near(result.logprobs, continuations(model, prompts, ids))
    assert result.labels == tuple(texts)


def worst_error(tiny_model):
    directory, model = tiny_model()
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 30), [random_ids(rng, n) for n in (3, 9)]
    expected = continuations(model, [query + item for item in items])
    with Scorer(str(directory), max_batch_tokens=64) as scorer:
        result = scorer.score(query, items, label_sequences=LABELS, logprobs=True)
    return np.abs(result.logprobs - expected).max()


def a_sibling_leaks(monkeypatch):
    """A label's node continues the node before it, whosever child it is."""

    def shifted(request, limits):
        made = plan_items(request, limits)
        parents = [-1 if above < 0 else row - 1 for row, above in enumerate(made.parents)]
        return replace(made, parents=parents)

    monkeypatch.setattr("gpuscore.engine.engine.plan_items", shifted)


def one_token_is_not_added(monkeypatch):
    def shorter(trie, logprobs):
        first = np.cumsum(trie.lengths) - trie.lengths
        return logprobs[:, trie.places[first]]

    monkeypatch.setattr(LabelTrie, "sums", shorter)


def test_without_a_defect(tiny_model):
    assert worst_error(tiny_model) < TOLERANCE


@pytest.mark.parametrize(
    "plant",
    [
        a_sibling_leaks,
        one_token_is_not_added,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_defect_is_visible(tiny_model, monkeypatch, plant):
    plant(monkeypatch)
    assert worst_error(tiny_model) > VISIBLE
