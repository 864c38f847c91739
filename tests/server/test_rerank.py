"""Promise: POST /rerank ranks documents, with the body and the answer of every dialect."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from gpuscore import Scorer
from support.connections import check_error, connected
from support.serving import SMALL, serving

QUERY = "a blue lamp of steel"
DOCUMENTS = ["wooden chair, red", "blue steel lamp", "lamp in blue", "green rug", "blue steel lamp"]
PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/infinity/rerank")


@pytest.fixture(scope="module")
def relevance():
    """p(yes) of each document's whole prompt, from the engine without families."""
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        prompts = [f"query: {QUERY}\nitem: {document}" for document in DOCUMENTS]
        probabilities = scorer.score("", prompts, labels=["yes", "no"], apply_softmax=True)
    return probabilities.scores[:, 0]


def rerank(client, path="/v1/rerank", **body):
    return client.post(path, json={"query": QUERY, "documents": DOCUMENTS} | body)


@pytest.mark.parametrize("path", PATHS)
def test_best_first(demo, relevance, path):
    answer = rerank(demo, path)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    order = [result["index"] for result in body["results"]]
    assert order == np.argsort(-relevance, kind="stable").tolist()
    assert order.index(1) < order.index(4), "equal documents keep their order"
    scores = np.array([result["relevance_score"] for result in body["results"]])
    np.testing.assert_allclose(scores, relevance[order], atol=1e-5)
    assert all(set(result) == {"index", "relevance_score"} for result in body["results"])
    assert body["id"] == answer.headers["x-request-id"]
    kind = "list" if path == "/v1/rerank" else "rerank"
    assert (body["object"], body["model"]) == (kind, "demo")
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 50
    assert body["meta"]["api_version"] == {"version": "2"}
    assert body["meta"]["billed_units"] == {"search_units": 1}


@pytest.mark.parametrize("name", ["documents", "texts"])
def test_label_mass(demo, name):
    """It equals the mass of the same prompts on /v1/score; a bad document has none."""
    prompts = [f"query: {QUERY}\nitem: {document}" for document in DOCUMENTS]
    body = {"items": prompts, "labels": ["yes", "no"], "return_label_mass": True}
    expected = demo.post("/v1/score", json=body).json()["label_mass"]
    asked = {"query": QUERY, name: DOCUMENTS, "top_n": 3, "return_label_mass": True}
    if name == "documents":
        asked |= {"documents": [*DOCUMENTS, None], "on_error": "null"}
    answer = demo.post("/rerank", json=asked).json()
    results = answer["results"] if name == "documents" else answer
    assert len(results) == 3
    for result in results:
        assert result["label_mass"] == pytest.approx(expected[result["index"]], abs=1e-5)
    nothing = {"query": QUERY, "documents": [None], "on_error": "null", "return_label_mass": True}
    assert demo.post("/rerank", json=nothing).json()["results"] == []


def test_raw_scores(demo, relevance):
    for flag in (True, "true", "True"):
        results = rerank(demo, raw_scores=flag).json()["results"]
        raw = {result["index"]: result["relevance_score"] for result in results}
        logit = np.log(relevance) - np.log1p(-relevance)
        np.testing.assert_allclose([raw[i] for i in range(5)], logit, atol=1e-3)


@pytest.mark.parametrize(("wanted", "count"), [(None, 5), (0, 5), (2, 2), (5, 5), (99, 5)])
def test_top_n(demo, wanted, count):
    whole = rerank(demo).json()["results"]
    assert rerank(demo, top_n=wanted).json()["results"] == whole[:count]
    assert rerank(demo, top_k=wanted).json()["results"] == whole[:count]


def test_documents_that_are_objects(demo):
    plain = rerank(demo, return_documents="true").json()["results"]
    assert [r["document"] for r in plain] == [{"text": DOCUMENTS[r["index"]]} for r in plain]
    objects = [{"text": document, "id": i} for i, document in enumerate(DOCUMENTS)]
    answer = rerank(demo, documents=objects, return_documents=True).json()["results"]
    assert [r["relevance_score"] for r in answer] == [r["relevance_score"] for r in plain]
    assert [r["document"] for r in answer] == [objects[r["index"]] for r in answer]
    sent = b'{"query":"q","documents":[{"text":"a","n":[1.00,1e+3]}],"return_documents":true}'
    kind = {"content-type": "application/json"}
    assert b'"n":[1.00,1e+3]' in demo.post("/rerank", content=sent, headers=kind).content
    sent = sent.replace(b"1.00", b'"\xff"')
    assert demo.post("/rerank", content=sent, headers=kind).status_code == 400
    split = [{"what": "lamp", "colour": "blue"}]
    of_fields = rerank(demo, documents=split, rank_fields=["colour", "what"]).json()["results"]
    of_texts = rerank(demo, documents=["colour: blue\nwhat: lamp"]).json()["results"]
    assert of_fields == of_texts


def test_tei(demo, relevance):
    body = {"query": QUERY, "texts": DOCUMENTS, "truncation_direction": "Right"}
    answer = demo.post("/rerank", json=body).json()
    assert [set(entry) for entry in answer] == [{"index", "score"}] * 5
    assert [entry["index"] for entry in answer] == np.argsort(-relevance, kind="stable").tolist()
    # As in the pull request 2496 of huggingface.js.
    wrapped = demo.post("/pipeline/text-ranking", json={"inputs": body})
    assert wrapped.json() == answer
    for wrong in ({"inputs": "a"}, {"inputs": body | {"x": 1}}, {"inputs": body, "x": 1}, {}):
        refused = demo.post("/pipeline/text-ranking", json=wrong)
        assert (refused.status_code, set(refused.json())) == (400, {"error", "error_type"})
    answer = demo.post("/rerank", json=body | {"return_text": True, "raw_scores": True}).json()
    assert all(entry["text"] == DOCUMENTS[entry["index"]] for entry in answer)
    assert answer[0]["score"] == pytest.approx(
        np.log(relevance.max() / (1 - relevance.max())), 1e-3
    )


LONG = ["blue lamp", "blue steel lamp, " * 200]


@pytest.fixture(scope="module")
def cutting():
    """A client of a server that cuts long documents for clients that say nothing."""
    flags = (*SMALL, "--max-model-len", "512", "--rerank-truncate")
    with serving("demo", *flags) as running, connected(running) as opened:
        yield opened


def test_truncation_is_reported(cutting):
    answer = rerank(cutting, documents=LONG, truncate=False)
    message = check_error(answer, 400, "prompt_too_long", "documents[1]")
    texts = {"query": QUERY, "texts": LONG}
    refused = cutting.post("/rerank", json=texts | {"truncate": False})
    assert refused.json()["error"] == message.replace("documents", "texts")
    assert "the limit is 512" in message
    cut = cutting.post("/rerank", json=texts | {"truncate": True}).json()
    assert {entry["index"]: entry.get("truncated", False) for entry in cut} == {0: False, 1: True}
    answer = rerank(cutting, documents=LONG, truncate=True).json()
    assert {r["index"]: r.get("truncated", False) for r in answer["results"]} == {0: False, 1: True}
    assert answer["meta"]["warnings"] == ["1 documents were truncated"]
    short = rerank(cutting, documents=LONG, max_tokens_per_doc=3).json()
    assert short["usage"]["prompt_tokens"] < 60


def test_truncation_of_pairs_is_reported(cutting):
    body = {"queries": QUERY, "documents": LONG}
    check_error(cutting.post("/v1/score", json=body), 400, "prompt_too_long", "documents[1]")
    for more in ({"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 100}):
        data = cutting.post("/v1/score", json=body | more).json()["data"]
        assert [entry.get("truncated", False) for entry in data] == [False, True]


def test_a_server_may_cut_for_clients_that_say_nothing(cutting):
    whole = rerank(cutting, documents=LONG, truncate=True).json()["results"]
    answer = rerank(cutting, documents=LONG).json()
    assert answer["results"] == whole
    assert answer["meta"]["warnings"] == ["1 documents were truncated"]
    texts = cutting.post("/rerank", json={"query": QUERY, "texts": LONG}).json()
    assert [entry.get("truncated") for entry in texts] == [r.get("truncated") for r in whole]
    assert cutting.get("/info").json()["auto_truncate"] is True


def test_errors_as_the_clients_read_them(demo):
    long = rerank(demo, documents=["blue lamp", "blue steel lamp, " * 1500])
    check_error(long, 400, "prompt_too_long", "documents[1]")
    refused = rerank(demo, top_n=-1)
    assert refused.json()["detail"] == "invalid_request: top_n"
    assert refused.text.count(refused.json()["error"]["message"]) == 1
    for body in ({"top_n": -1}, {"texts": "no list"}, {"unknown": 1}):
        answer = demo.post("/rerank", json={"query": QUERY, "texts": ["a"]} | body)
        assert answer.status_code == 400
        assert list(answer.json()) == ["error", "error_type"]
        assert answer.json()["error_type"] == "Validation"
    quoted = demo.post("/rerank", json={"query": '"texts"', "documents": 5})
    assert quoted.json()["error"]["param"] == "documents", "a text does not choose the shape"
    assert list(demo.post("/v1/score", json={}).json()) == ["error"]


def test_infinity_has_documents_as_text(demo):
    objects = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    answer = rerank(demo, "/infinity/rerank", documents=objects, return_documents=True).json()
    assert {r["index"]: r["document"] for r in answer["results"]} == dict(enumerate(DOCUMENTS))
    plain = rerank(demo, "/infinity/rerank").json()["results"]
    assert plain == rerank(demo).json()["results"]


BAD = {
    "neither": ({"documents": None}, "documents"),
    "both": ({"texts": ["a"]}, "documents"),
    "none": ({"documents": []}, "documents"),
    "no text": ({"documents": [{"body": "x"}]}, "documents[0]"),
    "text that is none": ({"documents": ["x", {"text": 5}]}, "documents[1]"),
    "rank_fields": ({"documents": [{"a": "x"}], "rank_fields": ["a", "b"]}, "documents[0]"),
    "unknown": ({"top_p": 1}, "top_p"),
    "no place for it": ({"instruction": "be kind"}, "instruction"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(demo, name):
    changes, param = BAD[name]
    check_error(rerank(demo, **changes), 400, "invalid_request", param)


def test_another_model_and_no_reranker(demo, client):
    check_error(rerank(demo, model="other"), 404, "model_not_found", "model")
    message = check_error(rerank(client), 400, "invalid_request", None)
    assert "--family" in message
    assert rerank(demo, model="demo").json()["model"] == "demo"


def test_many_documents(demo):
    """The documents fill more than one batch, and the answer is so large that it is made in a
    thread."""
    documents = [f"{i} {DOCUMENTS[i % 5]}" for i in range(700)]
    answer: httpx.Response = rerank(demo, documents=documents, top_n=3)
    assert len(answer.json()["results"]) == 3
    alone = rerank(demo, documents=documents[:1]).json()["results"][0]["relevance_score"]
    whole = {
        r["index"]: r["relevance_score"]
        for r in rerank(demo, documents=documents).json()["results"]
    }
    assert whole[0] == pytest.approx(alone, abs=1e-5)
    assert json.dumps(sorted(whole.values(), reverse=True)) == json.dumps(list(whole.values()))


RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("request_", RECORDED, ids=[entry["client"] for entry in RECORDED])
def test_bodies_of_clients_that_are_no_libraries(demo, request_):
    """Send the bodies that the clients' sources send, and check the parts of the answer that they
    read."""
    body = request_["body"]
    answer = demo.post(request_["path"], json=body, headers=request_["headers"])
    assert answer.status_code == 200, answer.text
    entries, documents = answer.json(), body.get("documents") or body["texts"]
    if "texts" in body:  # the client reads them in the order given, up to its own top_n
        assert all(entry["text"] == documents[entry["index"]] for entry in entries)
        scores = [entry["score"] for entry in entries]
    else:
        entries = entries["results"]
        scores = [entry["relevance_score"] for entry in entries]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores), "the clients compare them with a threshold"
    indices = [entry["index"] for entry in entries]
    assert len(set(indices)) == len(indices) == (body.get("top_n") or len(documents))
    if "lamp" in body["query"]:
        assert {indices[0], indices[1]} == {1, 2}
        assert scores[0] > 0.8, "the threshold that Dify begins with"


def test_dify_is_told_that_it_is_a_reranker(demo):
    """Dify's provider for TEI reads these fields before its first request."""
    info = demo.get("/info", headers={"Content-Type": "application/json"}).json()
    assert next(iter(info["model_type"])) == "reranker"
    assert info["max_input_length"] == 4096
    assert info["max_client_batch_size"] == 10000
