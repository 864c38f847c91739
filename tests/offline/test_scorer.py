"""Promise: what the server answers, `Scorer` answers in this process, from any thread, and results
become tables."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpuscore
from gpuscore import ConfigError, GpuscoreError, Scorer
from gpuscore.config import ModelConfig
from gpuscore.errors import InvalidRequest, MissingLabels
from support.connections import connected
from support.serving import QUICK, serving

SETTINGS = {"threads": 1, "max_batch_tokens": 512}
DOCUMENTS = ["A red steel lamp.", "A wooden chair in blue.", "A blue wool scarf.", "A chair."]
QUERY = "a blue wooden chair"


@pytest.fixture(scope="module")
def scorer():
    with Scorer("demo", **SETTINGS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client():
    with serving("demo", *QUICK) as server, connected(server) as opened:
        yield opened


def ask(client, path, **body):
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def close(values, others):
    np.testing.assert_allclose(values, others, atol=1e-5)


def test_rerank_as_over_http(scorer, client):
    answer = ask(client, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=3)
    ranking = scorer.rerank(QUERY, DOCUMENTS, 3)
    assert ranking.indices.tolist() == [entry["index"] for entry in answer["results"]]
    close(ranking.scores, [entry["relevance_score"] for entry in answer["results"]])
    assert ranking.documents == tuple(DOCUMENTS[i] for i in ranking.indices)
    assert ranking.prompt_tokens == answer["usage"]["total_tokens"]
    raw = ask(client, "/rerank", query=QUERY, documents=DOCUMENTS, raw_scores=True)
    whole = scorer.rerank(QUERY, DOCUMENTS, raw_scores=True)
    close(whole.scores, [entry["relevance_score"] for entry in raw["results"]])
    cut = scorer.rerank(QUERY, DOCUMENTS, max_tokens_per_doc=3)
    body = {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 3}
    expected = ask(client, "/rerank", **body)["results"]
    assert cut.truncated.tolist() == [entry.get("truncated", False) for entry in expected]
    assert cut.truncated.any()


def test_any_thread_may_call(scorer):
    expected = scorer.rerank(QUERY, DOCUMENTS)
    classes = scorer.classify(DOCUMENTS, labels=["yes", "no"]).probabilities

    def call(number):
        if number % 3 == 0:
            return scorer.rerank(QUERY, DOCUMENTS).scores, expected.scores
        if number % 3 == 1:
            return scorer.classify(DOCUMENTS, labels=["yes", "no"]).probabilities, classes
        items = random.Random(number).choices(DOCUMENTS, k=9)
        many = scorer.score("q: ", items, labels=["yes", "no"]).scores
        return many[0], scorer.score("q: ", items[:1], labels=["yes", "no"]).scores[0]

    with ThreadPoolExecutor(8) as pool:
        for result, wanted in pool.map(call, range(30)):
            close(result, wanted)


def test_settings_beside_the_model():
    with pytest.raises(TypeError, match="dtyp"):
        Scorer("demo", dtyp="float32")
    with pytest.raises(ConfigError, match="threads must be set in the ModelConfig"):
        Scorer(ModelConfig(), threads=1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.rerank(QUERY, []), InvalidRequest, "at least one document"),
        (lambda s: s.rerank(QUERY, DOCUMENTS, 0), InvalidRequest, "top_n is 0"),
        (lambda s: s.rerank(None, ["a"]), InvalidRequest, "query is null; it must be a text"),
        (lambda s: s.score_pairs([("a",)]), InvalidRequest, r"pairs\[0\] must be a query and a"),
        (lambda s: s.score_pairs(["ab"]), InvalidRequest, r"pairs\[0\] must be a query and a"),
        (lambda s: s.classify("a"), MissingLabels, "this model has no classes"),
    ],
)
def test_wrong_calls(scorer, call, error, message):
    with pytest.raises(error, match=message) as raised:
        call(scorer)
    assert isinstance(raised.value, GpuscoreError)


def test_a_model_without_a_family_says_what_python_can_call():
    with Scorer("demo", family="none", **SETTINGS) as plain:
        for call in (plain.rerank, lambda q, d: plain.score_pairs([(q, d[0])])):
            with pytest.raises(InvalidRequest, match="family= in Python.*Scorer.score in Python"):
                call(QUERY, DOCUMENTS)


def test_public_names():
    for name in gpuscore.__all__:
        assert getattr(gpuscore, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        gpuscore.nothing  # noqa: B018
