"""Promise: what the server answers, `Scorer` and `AsyncScorer` answer in this process, from any
thread, and results become tables."""

import asyncio
import inspect
import random
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpuscore
from gpuscore import AsyncScorer, ConfigError, GpuscoreError, Scorer
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import InvalidRequest, MissingLabels, TokenIdOutOfRange
from gpuscore.offline.scorer import LoadedScorer, ModelSettings
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


def test_many_requests_in_the_given_order(scorer):
    sizes = [1, 3, 0, 40, 2, 1] * 14
    requests = [
        (f"query: {QUERY}, number {i}\nitem: ", [f"{d} {i}" for d in DOCUMENTS * 10][:n])
        for i, n in enumerate(sizes)
    ]
    drawn = []

    def one_by_one():
        for number, request in enumerate(requests):
            drawn.append(number)
            yield request

    scores = scorer.score_many(one_by_one(), labels=["yes", "no"], logprobs=True)
    first = next(scores)
    assert len(drawn) < len(requests), "not all are prepared before the first is scored"
    for request, many in zip(requests, [first, *scores], strict=True):
        alone = scorer.score(*request, labels=["yes", "no"], logprobs=True)
        assert many.scores.shape == alone.scores.shape
        if len(request[1]):
            close(many.scores, alone.scores)
            close(many.label_mass, alone.label_mass)


def test_an_error_comes_at_its_place(scorer):
    scores = scorer.score_many([([1, 2], [[3]]), ([1, 2], [[10**6]])], label_token_ids=[5])
    assert next(scores).scores.shape == (1, 1), "scores before it come first"
    with pytest.raises(TokenIdOutOfRange, match="1000000"):
        next(scores)
    assert list(scores) == []


def test_what_nobody_waits_for_leaves_the_engine(scorer, monkeypatch):
    queue, futures = Engine.score, []

    def noted(engine, *arguments):
        futures.append(queue(engine, *arguments))
        return futures[-1]

    def left():
        return sum(not future.done() for future in futures)

    monkeypatch.setattr(Engine, "score", noted)
    scores = scorer.score_many(
        ((f"number {i}: ", DOCUMENTS * 5) for i in range(10**6)), labels=["yes", "no"]
    )
    most = 0
    for _ in range(20):  # a batch may have answered all that were there
        assert next(scores).scores.shape == (20, 2)
        most = max(most, left())
    assert most > 2, "several are in the engine at a time"
    scores.close()
    assert left() == 0


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


MANY = [(f"q {n}: ", DOCUMENTS[: 1 + n % 4]) for n in range(12)]


def test_the_same_methods_for_asyncio(scorer):
    async def ask_all():
        async with AsyncScorer("demo", **SETTINGS) as other:
            calls = [
                other.score("q: ", DOCUMENTS, labels=["yes", "no"]),
                other.score("q: ", [], labels=["yes", "no"]),
                other.rerank(QUERY, DOCUMENTS),
                other.score_pairs([(QUERY, DOCUMENTS[0])]),
                other.classify("a lamp", labels=["yes", "no"]),
            ]
            results = await asyncio.gather(*calls)
            task = asyncio.create_task(other.score("q: ", DOCUMENTS * 1000, labels=["yes", "no"]))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            many = [result async for result in other.score_many(MANY, labels=["yes", "no"])]
            stream = other.score_many(iter(MANY * 100), labels=["yes", "no"])
            assert len((await anext(stream)).scores) == 1
            await stream.aclose()  # drops the rest
            # More calls at once than a server would take.
            short = (other.score([1], [[2]], label_token_ids=[3]) for _ in range(1100))
            await asyncio.gather(*short)
            return *results, many

    scores, empty, ranking, pairs, classes, many = asyncio.run(ask_all())
    close(scores.scores, scorer.score("q: ", DOCUMENTS, labels=["yes", "no"]).scores)
    assert empty.scores.shape == (0, 0)
    close(ranking.scores, scorer.rerank(QUERY, DOCUMENTS).scores)
    close(pairs.scores, scorer.score_pairs([(QUERY, DOCUMENTS[0])]).scores)
    close(classes.probabilities, scorer.classify("a lamp", labels=["yes", "no"]).probabilities)
    for result, alone in zip(many, scorer.score_many(MANY, labels=["yes", "no"]), strict=True):
        close(result.scores, alone.scores)


def test_both_have_the_same_methods_and_settings():
    for name, method in inspect.getmembers(Scorer, inspect.isfunction):
        if name.startswith("_") or name in ("warmup", "close"):
            continue
        for_asyncio = inspect.signature(getattr(AsyncScorer, name))
        assert inspect.signature(method).parameters == for_asyncio.parameters, name
    hints = typing.get_type_hints(ModelConfig)
    assert hints.pop("model") is str
    assert typing.get_type_hints(ModelSettings) == hints
    described = inspect.getdoc(LoadedScorer)
    assert all(f"{setting}: " in described for setting in hints)
    with pytest.raises(TypeError, match="dtyp"):
        Scorer("demo", dtyp="float32")
    with pytest.raises(ConfigError, match="threads is given beside a ModelConfig"):
        Scorer(ModelConfig(), threads=1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.rerank(QUERY, "one text"), InvalidRequest, "documents must be a list"),
        (lambda s: s.rerank(QUERY, []), InvalidRequest, "at least one document"),
        (lambda s: s.rerank(QUERY, DOCUMENTS, 0), InvalidRequest, "top_n is 0"),
        (lambda s: s.rerank(None, ["a"]), InvalidRequest, "query is null; it must be a text"),
        (lambda s: s.rerank("a", [3]), InvalidRequest, r"documents\[0\] is of type int; it must"),
        (lambda s: s.score_pairs([("a", None)]), InvalidRequest, r"pairs\[0\] is null; it must be"),
        (lambda s: s.score_pairs([("a",)]), InvalidRequest, r"pairs\[0\] must be a query and a"),
        (lambda s: s.score_pairs(["ab"]), InvalidRequest, r"pairs\[0\] must be a query and a"),
        (lambda s: s.score("q", [None], labels=["yes"]), InvalidRequest, r"items\[0\] is null"),
        (lambda s: s.score("q", ["a"], labels="yes"), InvalidRequest, "labels must be a list"),
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
