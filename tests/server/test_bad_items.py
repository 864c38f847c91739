"""Promise: with `on_error: null` a bad item gets no score and an error, and the others are scored
as without it, bit for bit: over HTTP and in this process."""

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.errors import GpuscoreError, InvalidRequest, PromptTooLong
from support.slow import slow

QUERY = "query: a blue lamp\nitem: "
LONG = "blue lamp " * 4000
GOOD = ["A red lamp.", "A blue lamp of steel.", "A blue rug."]
# Places of bad items, each with its error, among the good ones.
MIXTURES = [
    {0: (LONG, "prompt_too_long")},
    {3: (LONG, "prompt_too_long")},
    {0: (None, "invalid_request"), 2: (LONG, "prompt_too_long"), 5: (None, "invalid_request")},
]
ALL = dict.fromkeys(range(3), (None, "invalid_request"))
LABELS = {"labels": ["yes", "no"]}


@pytest.fixture
def http(deterministic):
    """A client of a deterministic server, so that answers can be compared bit for bit."""
    return deterministic


@pytest.fixture(scope="module")
def scorer():
    with Scorer("demo", threads=1, deterministic=True, max_batch_tokens=512) as opened:
        yield opened


def mixed(bad, good=GOOD):
    items, rest = [], iter(good)
    for index in range(len(bad) + len(good)):
        items.append(bad[index][0] if index in bad else next(rest))
    return items


def places(bad, count):
    return [index for index in range(count) if index not in bad]


def ask(client, path, **body):
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def same(got, expected):
    np.testing.assert_array_equal(got, expected)


def same_errors(answer, local):
    """The places in the messages are the same, too."""
    told = [(error["index"], error["code"], error["message"]) for error in answer["errors"]]
    assert told == [(error.index, error.code, error.message) for error in local.errors]


def test_no_bad_items_and_only_bad_items(http):
    fine = ask(http, "/v1/score", query=QUERY, items=GOOD, on_error="null", **LABELS)
    assert fine["errors"] == []
    none = ask(http, "/v1/score", query=QUERY, items=[], on_error="null", **LABELS)
    assert (none["scores"], none["errors"]) == ([], [])
    bad = ask(http, "/v1/score", query=[5], items=[None, [10**6]], label_token_ids=[[1], [2, 3]],
              on_error="null", return_label_mass=True)  # fmt: skip
    assert (bad["scores"], bad["label_mass"]) == ([None, None], [None, None])
    assert [error["code"] for error in bad["errors"]] == [
        "invalid_request",
        "token_id_out_of_range",
    ]
    assert bad["usage"]["prompt_tokens"] == 0
    empty = ask(http, "/v1/score", items=["", "a"], on_error="null", **LABELS)
    assert [error["code"] for error in empty["errors"]] == ["empty_prompt"]
    ranking = ask(http, "/v1/rerank", query="q", documents=[None, LONG], on_error="null")
    assert (ranking["results"], len(ranking["errors"])) == ([], 2)
    assert ranking["meta"]["billed_units"] == {"search_units": 0}


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/score", {"query": LONG, "items": ["a"], **LABELS}, "prompt_too_long", "query"),
        ("/v1/score", {"query": "a", "items": ["b"], "labels": [""]}, None, "labels[0]"),
        ("/v1/score", {"query": "a", "items": [None], "model": "x", **LABELS}, None, "model"),
        ("/v1/score", {"query": "a", "items": [1], **LABELS}, "invalid_request", "items[0]"),
        ("/v1/rerank", {"query": LONG, "documents": ["a", None]}, "prompt_too_long", "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "invalid_request", "documents"),
        ("/v1/score", {"queries": LONG, "documents": ["a", "b"]}, "prompt_too_long", "queries"),
        ("/rerank", {"query": "a", "texts": ["b"]}, None, None),
        (
            "/v1/score",
            {"query": "a", "items": ["b"], "on_error": "skip", **LABELS},
            None,
            "on_error",
        ),  # fmt: skip
    ],
)
def test_errors_of_the_whole_request_stay(http, path, body, code, param):
    reply = http.post(path, json={"on_error": "null"} | body)
    assert reply.status_code in (400, 404), reply.text
    error = reply.json()["error"]
    if isinstance(error, str):  # TEI's
        assert "on_error null needs documents" in error
        return
    assert code is None or error["code"] == code
    assert error["param"] == param


def test_documents_that_are_objects(http):
    documents = [{"title": "lamp"}, {"title": "rug", "text": "A blue lamp."}, {"text": 7}, "lamp"]
    answer = ask(http, "/infinity/rerank", query="lamp", documents=documents, on_error="null")
    assert {entry["index"] for entry in answer["results"]} == {1, 3}
    assert [error["index"] for error in answer["errors"]] == [0, 2]


@pytest.mark.parametrize("bad", [MIXTURES[0], *slow(MIXTURES[1]), MIXTURES[2]])
def test_pairs_over_http(http, scorer, bad):
    documents = mixed(bad)
    queries = [f"a blue {'lamp' if index % 2 else 'rug'}" for index in range(len(documents))]
    if len(bad) == 1:  # the query is what is wrong
        (index,) = bad
        documents[index], queries[index] = "lamp", LONG
    left = places(bad, len(documents))
    answer = ask(http, "/v1/score", queries=queries, documents=documents, on_error="null")
    good = {"queries": [queries[i] for i in left], "documents": [documents[i] for i in left]}
    alone = ask(http, "/v1/score", **good)
    assert [answer["data"][i]["score"] for i in left] == [entry["score"] for entry in alone["data"]]
    assert [entry["index"] for entry in answer["data"]] == list(range(len(documents)))
    assert all(answer["data"][i]["score"] is None for i in bad)
    assert [(e["index"], e["code"]) for e in answer["errors"]] == [(i, bad[i][1]) for i in bad]
    local = scorer.score_pairs(list(zip(queries, documents, strict=True)), on_error="null")
    same(local.scores[left], [entry["score"] for entry in alone["data"]])
    assert np.isnan(local.scores[list(bad)]).all()
    assert [(e.index, e.code) for e in local.errors] == [(i, bad[i][1]) for i in bad]


@pytest.mark.parametrize("bad", [*slow(MIXTURES[0]), *slow(MIXTURES[1]), MIXTURES[2], *slow(ALL)])
def test_the_server_and_the_scorer(http, scorer, bad):
    options = {"on_error": "null"}
    good = GOOD if len(bad) != 3 or 5 in bad else []
    items = mixed(bad, good)
    left = places(bad, len(items))
    local = scorer.score(QUERY, items, logprobs=True, **LABELS, **options)
    wanted = {"return_label_logprobs": True, "return_label_mass": True} | LABELS | options
    remote = ask(http, "/v1/score", query=QUERY, items=items, **wanted)
    alone = scorer.score(QUERY, good, logprobs=True, **LABELS)
    assert local.scores.shape == (len(items), 2)
    for name, there in (("scores",) * 2, ("logprobs", "label_logprobs"), ("label_mass",) * 2):
        values, told = getattr(local, name), remote[there]
        same(values[left], getattr(alone, name).reshape(values[left].shape))
        same(values[left], np.reshape([told[i] for i in left], values[left].shape))
        assert np.isnan(values[list(bad)]).all()
        assert [told[i] for i in bad] == [None] * len(bad)
    assert local.prompt_tokens == remote["usage"]["prompt_tokens"] == alone.prompt_tokens
    same_errors(remote, local)
    ranked = scorer.rerank("lamp", items, 2, **options)
    answer = ask(http, "/v1/rerank", query="lamp", documents=items, top_n=2, **options)
    assert [entry["index"] for entry in answer["results"]] == ranked.indices.tolist()
    same([entry["relevance_score"] for entry in answer["results"]], ranked.scores)
    same_errors(answer, ranked)
    if good:
        alone = scorer.rerank("lamp", good, 2)
        assert ranked.indices.tolist() == [left[index] for index in alone.indices]
        same(ranked.scores, alone.scores)


def test_in_this_process(scorer):
    with pytest.raises(InvalidRequest, match="on_error must be"):
        scorer.score("q", ["a"], labels=["yes"], on_error="skip")
    items = ["a", float("nan"), "half \ud800", 7, LONG, "b"]
    scored = scorer.score("q ", items, labels=["yes"], on_error="null", logits=True)
    assert [error.index for error in scored.errors] == [1, 2, 3, 4]
    alone = scorer.score("q ", ["a", "b"], labels=["yes"], logits=True)
    same(scored.logits[[0, 5]], alone.logits)
    for index in (1, 2, 3, 4):
        with pytest.raises(GpuscoreError):
            scorer.score("q ", [items[index]], labels=["yes"])
    with pytest.raises(PromptTooLong, match="query alone"):
        scorer.score(LONG, ["a", None], labels=["yes"], on_error="null")
    for documents in (["a", None], ["a", "half \ud800"]):
        with pytest.raises(InvalidRequest, match=r"documents\[1\]"):
            scorer.rerank("q", documents)
    for result in (
        scorer.score("q", [None, "a"], labels=["yes"], on_error="null"),
        scorer.score("q", [None], labels=["yes"], on_error="null"),
        scorer.rerank("q", [None, "a"], on_error="null"),
        scorer.score_pairs([("q", None), ("q", "a")], on_error="null"),
    ):
        assert [error.index for error in result.errors] == [0]
