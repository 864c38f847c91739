"""Promise: every method of the clients returns what the same method of `Scorer` returns."""

import inspect
import math

import numpy as np
import pytest

from client.conftest import WITH_KEY
from gpuscore import AsyncScorer, Scorer
from gpuscore.client import AsyncClient, Client, StatusError
from gpuscore.types.results import Classification, PairScores, Ranking
from support.slow import slow

QUERY = "a blue lamp"
DOCUMENTS = ["A red lamp.", "A blue lamp of steel.", "", "A green rug.", "A blue lamp of steel."]
PAIRS = [("a rug", DOCUMENTS[3]), (QUERY, DOCUMENTS[0]), (QUERY, DOCUMENTS[1]), ("a rug", "x")]
TEXTS = [f"query: a lamp\nitem: {document}" for document in DOCUMENTS]
SPLITS = [*slow({}), {"max_items_per_request": 3}, *slow({"max_bytes_per_request": 200})]
ONLY_HTTP = {"model", "priority", "cache_salt", "request_id", "rank_fields"}
ONLY_HERE = {"logits", "progress"}


def same(got, expected):
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("options", [*slow({}), {"raw_scores": True, "max_tokens_per_doc": 3}])
def test_pairs(url, scorer, call, split, options):
    expected = scorer.score_pairs(PAIRS, **options)
    answer = call(url, "score_pairs", PAIRS, client=WITH_KEY | split, **options)
    # Pairs of one query are cut elsewhere than pairs of several, so bits may differ.
    np.testing.assert_allclose(answer.scores, expected.scores, atol=1e-5)
    same(answer.truncated, expected.truncated)
    assert answer.prompt_tokens == expected.prompt_tokens
    assert isinstance(answer, PairScores)
    assert (answer.model, answer.errors) == ("demo", ())


@pytest.mark.parametrize("split", SPLITS)
def test_rankings(url, scorer, call, split):
    for options in ({}, {"top_n": 2}, {"raw_scores": True, "max_tokens_per_doc": 3}):
        expected = scorer.rerank(QUERY, DOCUMENTS, **options)
        answer = call(url, "rerank", QUERY, DOCUMENTS, client=WITH_KEY | split, **options)
        for name in ("indices", "scores", "truncated"):
            same(getattr(answer, name), getattr(expected, name))
        assert (answer.documents, answer.prompt_tokens) == (
            expected.documents,
            expected.prompt_tokens,
        )
        assert isinstance(answer, Ranking)


@pytest.mark.parametrize("split", SPLITS)
def test_classes(url, scorer, call, split):
    expected = scorer.classify(TEXTS, labels=["yes", "no"])
    answer = call(url, "classify", TEXTS, client=WITH_KEY | split, labels=["yes", "no"])
    same(answer.probabilities, expected.probabilities)
    same(answer.truncated, expected.truncated)
    assert (answer.classes, answer.best) == (expected.classes, expected.best)
    assert answer.prompt_tokens == expected.prompt_tokens
    assert isinstance(answer, Classification)
    assert len(answer.request_ids) == (1 if not split else len(set(answer.request_ids)))
    (best,) = call(url, "classify", TEXTS[0], client=WITH_KEY, labels=["yes", "no"]).best
    assert best == expected.best[0]


@pytest.mark.parametrize("split", [{}, {"max_items_per_request": 1}])
def test_completions(url, scorer, call, split):
    prompts = ["query: a lamp", "item"]
    answer = call(url, "completions", prompts, client=WITH_KEY | split, logprobs=1)
    assert [completion.text for completion in answer.completions] == prompts
    ids = call(url, "completions", [[5, 6, 7]], client=WITH_KEY, max_tokens=1, logprobs=1)
    (completion,) = ids.completions
    assert math.isnan(completion.logprobs[0])
    scored = [
        scorer.score([], [[5, 6, 7][:end]], label_token_ids=[[5, 6, 7][end]], logprobs=True)
        for end in (1, 2)
    ]
    np.testing.assert_allclose(
        completion.logprobs[1:3], [s.logprobs[0, 0] for s in scored], atol=1e-5
    )
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.best) == 4
    assert completion.best[0] is None
    assert completion.best[3][completion.tokens[3]] == completion.logprobs[3]
    assert ids.prompt_tokens == 3
    flat = call(url, "completions", np.array([5, 6, 7]), client=WITH_KEY, max_tokens=1, logprobs=1)
    same(flat.completions[0].logprobs, completion.logprobs)
    (plain,) = call(url, "completions", "a lamp", client=WITH_KEY, logprobs=None).completions
    assert (plain.text, plain.tokens, plain.best, len(plain.logprobs)) == ("a lamp", (), (), 0)
    with pytest.raises(StatusError, match="max_tokens"):
        call(url, "completions", "a", client=WITH_KEY, max_tokens=16)


def test_cached_tokens_are_told(url, call):
    client = WITH_KEY | {"max_concurrent_requests": 1}
    documents = [f"{number} lamps" for number in range(4)]
    answer = call(url, "rerank", "a blue lamp " * 20, documents, client=client)
    assert 0 < answer.cached_tokens < answer.prompt_tokens


def test_an_error_names_the_place_in_the_whole_list(url, call):
    items = [[1], [2], [3], [10**6], [4]]
    split = {"max_items_per_request": 2, "max_concurrent_requests": 1}
    with pytest.raises(StatusError) as caught:
        call(url, "score", [5], items, client=WITH_KEY | split, label_token_ids=[1])
    assert caught.value.param == "items[3]"
    assert caught.value.message.startswith("items[3] holds token id 1000000")


@pytest.mark.parametrize("pair", [(Client, Scorer), (AsyncClient, AsyncScorer)])
def test_the_same_arguments(pair):
    remote, local = pair
    for name in ("score", "rerank", "score_pairs", "classify"):
        ours = inspect.signature(getattr(remote, name)).parameters
        theirs = inspect.signature(getattr(local, name)).parameters
        assert [n for n in ours if n not in ONLY_HTTP] == [n for n in theirs if n not in ONLY_HERE]
        for shared in set(ours) & set(theirs):
            assert ours[shared].default == theirs[shared].default, (name, shared)
