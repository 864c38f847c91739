"""Promise: over HTTP every dialect gives the scores of /v1/score, for the demo model.
test_rerank.py tests /rerank."""

import math

import numpy as np
import pytest

from gpuscore.dialects.served import ServedModel
from gpuscore.dialects.table import DIALECTS
from gpuscore.server.service import ScoringService
from support.connections import check_error
from support.stub_service import ask, stub_service

QUERY = "a blue lamp of steel"
DOCUMENTS = ["wooden chair, red", "blue steel lamp", "lamp in blue", "green rug", "blue steel lamp"]


def prompts(query=QUERY, documents=DOCUMENTS):
    return [f"query: {query}\nitem: {document}" for document in documents]


def probabilities(demo, items, labels=("yes", "no"), **more):
    body = {"items": items, "labels": labels, "apply_softmax": True} | more
    answer = demo.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_examples_work(demo):
    """The examples that /docs shows are answered."""
    for dialect in DIALECTS:
        for path in dialect.paths:
            answer = demo.post(path, json=dialect.example)
            expected = 200 if dialect.answers else 400  # some routes are always refused
            assert answer.status_code == expected, (path, answer.text)


class TestPairs:
    """Bodies of vLLM's /v1/score."""

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("queries", "documents"),
            ("queries", "items"),
            ("text_1", "text_2"),
            ("data_1", "data_2"),
        ],
    )
    def test_one_query(self, demo, first, second):
        expected = [row[0] for row in probabilities(demo, prompts())["scores"]]
        for query in (QUERY, [QUERY]):
            answer = demo.post("/v1/score", json={first: query, second: DOCUMENTS}).json()
            assert (answer["object"], answer["model"]) == ("list", "demo")
            assert [entry["index"] for entry in answer["data"]] == list(range(5))
            assert {entry["object"] for entry in answer["data"]} == {"score"}
            got = [entry["score"] for entry in answer["data"]]
            np.testing.assert_allclose(got, expected, atol=1e-5)
        assert answer["usage"]["total_tokens"] > 50

    def test_a_query_for_each(self, demo):
        queries = [QUERY, QUERY, "a rug", "a chair", "a chair"]
        pairs = [prompts(q, [d])[0] for q, d in zip(queries, DOCUMENTS, strict=True)]
        expected = [row[0] for row in probabilities(demo, pairs)["scores"]]
        answer = demo.post("/v1/score", json={"text_1": queries, "text_2": DOCUMENTS}).json()
        np.testing.assert_allclose([e["score"] for e in answer["data"]], expected, atol=1e-5)
        raw = demo.post(
            "/v1/score", json={"text_1": queries, "text_2": DOCUMENTS, "use_activation": False}
        ).json()
        logit = [math.log(p) - math.log1p(-p) for p in expected]
        np.testing.assert_allclose([e["score"] for e in raw["data"]], logit, atol=1e-3)

    def test_one_document(self, demo):
        answer = demo.post("/v1/score", json={"queries": QUERY, "documents": DOCUMENTS[0]}).json()
        assert len(answer["data"]) == 1

    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"text_1": QUERY}, "queries"),
            ({"documents": None}, "documents"),
            ({"documents": []}, "documents"),
            ({"queries": [QUERY, QUERY]}, "queries"),
            ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
            ({"instruction": "be kind"}, "instruction"),
            ({"labels": ["yes"]}, "labels"),
            ({"documents": [5]}, "documents[0]"),
        ],
    )
    def test_what_is_refused(self, demo, changes, param):
        body = {"queries": QUERY, "documents": DOCUMENTS} | changes
        check_error(demo.post("/v1/score", json=body), 400, "invalid_request", param)

    def test_a_value_chooses_no_dialect(self, demo):
        """Only the names of the top-level fields choose the dialect."""
        answer = demo.post("/v1/score", json={"items": ["queries"], "labels": ["yes"]})
        assert answer.status_code == 200
        body = {"items": ["text_1"], "labels": ["yes"], "unknown": {"text_1": 1}}
        check_error(demo.post("/v1/score", json=body), 400, "invalid_request", "unknown")

    def test_models_of_no_family(self, client):
        body = {"queries": QUERY, "documents": DOCUMENTS}
        message = check_error(client.post("/v1/score", json=body), 400, "invalid_request", None)
        assert "--family" in message


def test_default_labels_are_the_familys(demo, client):
    expected = probabilities(demo, prompts())["scores"]
    answer = demo.post("/v1/score", json={"items": prompts(), "apply_softmax": True}).json()
    np.testing.assert_allclose(answer["scores"], expected, atol=1e-5)
    check_error(client.post("/v1/score", json={"items": ["a"]}), 400, "missing_labels")


NO_LABELS = {"method": "POST", "url": "/v1/score", "json": {"items": [[5]]}}


def test_labels_may_be_left_out_while_the_model_loads():
    """The client is told to come again, because default labels are not known yet."""
    (reply,) = ask(ScoringService([ServedModel("tiny")]), NO_LABELS)
    check_error(reply, 503, "unavailable", None)
    (reply,) = ask(stub_service(), NO_LABELS)
    check_error(reply, 400, "missing_labels", "label_token_ids")


class TestClassify:
    def test_labels(self, demo):
        expected = probabilities(demo, prompts(), return_label_mass=True)
        body = {"input": prompts(), "labels": ["yes", "no"], "return_label_mass": True}
        for path in ("/classify", "/v1/classify"):
            answer = demo.post(path, json=body).json()
            got = [entry["probs"] for entry in answer["data"]]
            np.testing.assert_allclose(got, expected["scores"], atol=1e-5)
            masses = [entry["label_mass"] for entry in answer["data"]]
            np.testing.assert_allclose(masses, expected["label_mass"], atol=1e-5)
            for entry, row in zip(answer["data"], expected["scores"], strict=True):
                assert entry["label"] == ["yes", "no"][int(np.argmax(row))]
                assert entry["num_classes"] == 2
            assert answer["labels"] == ["yes", "no"]
        alone = demo.post("/classify", json=body | {"input": prompts()[0]}).json()
        np.testing.assert_allclose(alone["data"][0]["probs"], expected["scores"][0], atol=1e-5)

    @pytest.mark.parametrize("labels", [["yes", "yes and no"], ["a rug", "a lamp", "no"]])
    def test_labels_of_several_tokens(self, demo, labels):
        expected = probabilities(demo, prompts(), labels, return_label_mass=True)
        body = {"input": prompts(), "labels": labels, "return_label_mass": True}
        data = demo.post("/v1/classify", json=body).json()["data"]
        np.testing.assert_allclose([e["probs"] for e in data], expected["scores"], atol=1e-5)
        masses = [entry["label_mass"] for entry in data]
        np.testing.assert_allclose(masses, expected["label_mass"], atol=1e-5)

    def test_raw(self, demo):
        body = {"input": prompts(), "labels": ["yes", "no"], "use_activation": False}
        rows = np.array([e["probs"] for e in demo.post("/classify", json=body).json()["data"]])
        shares = np.exp(rows[:, 0]) / np.exp(rows).sum(axis=1)
        expected = [row[0] for row in probabilities(demo, prompts())["scores"]]
        np.testing.assert_allclose(shares, expected, atol=1e-5)

    @pytest.mark.parametrize(
        ("changes", "code", "param"),
        [
            ({"input": []}, "invalid_request", "input"),
            ({"input": [5]}, "invalid_request", "input[0]"),
            ({"labels": None}, "missing_labels", "labels"),
            ({"labels": []}, "empty_labels", "labels"),
            ({"labels": ["yes", "no", "yes"]}, "invalid_request", "labels[2]"),
            ({"truncation_side": "left"}, "invalid_request", "truncation_side"),
            ({"query": "q"}, "invalid_request", "query"),
            ({"truncate": True}, "invalid_request", "truncate"),
            ({"max_tokens_per_doc": -1}, "invalid_request", "max_tokens_per_doc"),
        ],
    )
    def test_what_is_refused(self, demo, changes, code, param):
        body = {"input": ["a", "b"], "labels": ["yes", "no"]} | changes
        check_error(demo.post("/v1/classify", json=body), 400, code, param)


def test_info(demo, client):
    info = demo.get("/info").json()
    assert info["model_id"] == "demo"
    assert info["model_type"]["reranker"]["id2label"] == {"0": "relevance"}
    assert (info["max_input_length"], info["auto_truncate"]) == (4096, False)
    assert info["max_client_batch_size"] == 10000
    assert info["gpuscore"]["family"]["prompt"] == ["query: {query}\nitem: {document}"]
    assert info["gpuscore"]["settings"] == {"threads": 1, "max_batch_tokens": 512}, (
        "what differs from the defaults"
    )
    assert info["gpuscore"]["machine"]["cores"] >= 1
    assert "language_model" in client.get("/info").json()["model_type"]
