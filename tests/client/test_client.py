"""Promise: both clients return what `Scorer` returns, whether or not they split the call."""

import json

import httpx
import numpy as np
import pytest

from client.conftest import KEY, WITH_KEY
from gpuscore.client import Client, ConnectionFailed, StatusError
from gpuscore.errors import InvalidRequest

QUERY = "query: a blue lamp\nitem: "
ITEMS = [f"{colour} {thing}" for colour in ("blue", "red", "grün") for thing in ("lamp", "rug", "")]
LABELS = ["yes", "no"]
SMALL = [
    {"max_items_per_request": 2},
    {"max_bytes_per_request": 150, "max_concurrent_requests": 1},
    {"max_bytes_per_request": 1, "max_concurrent_requests": 20},
]


def same(got, expected):
    """Compare bit for bit: the server is deterministic, so a split must not show."""
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("softmax", [False, True])
def test_scores_are_the_scorers(url, scorer, call, softmax):
    expected = scorer.score(QUERY, ITEMS, labels=LABELS, apply_softmax=softmax, logprobs=True)
    wanted = {"apply_softmax": softmax, "logprobs": True, "request_id": "mine"}
    answer = call(url, "score", QUERY, ITEMS, client=WITH_KEY, labels=LABELS, **wanted)
    assert answer.scores.dtype == np.float64
    same(answer.scores, expected.scores)
    same(answer.logprobs, expected.logprobs)
    same(answer.label_mass, expected.label_mass)
    assert answer.prompt_tokens == expected.prompt_tokens
    assert list(answer.columns()) == list(expected.columns()), "one type of results"
    assert (answer.model, answer.request_ids) == ("demo", ("mine",))


@pytest.mark.parametrize("split", SMALL)
def test_a_split_list_comes_back_in_order(url, scorer, call, split):
    expected = scorer.score(QUERY, ITEMS, labels=LABELS, logprobs=True)
    answer = call(url, "score", QUERY, ITEMS, client=WITH_KEY | split, labels=LABELS, logprobs=True)
    same(answer.scores, expected.scores)
    same(answer.label_mass, expected.label_mass)
    same(answer.logprobs, expected.logprobs)
    assert answer.prompt_tokens == expected.prompt_tokens
    assert len(answer.request_ids) == len(set(answer.request_ids)) > 1


def test_labels_of_every_item_go_with_it(url, scorer, call):
    query, items = np.arange(9), [np.array([5, 6, 7]), [8], [9, 9], np.int32([3])]
    labels = [[1, 2], np.array([3]), [4, 5, 6], [7]]
    expected = scorer.score(list(query), [list(i) for i in items], label_token_ids=labels)
    for split in ({}, {"max_items_per_request": 1}, {"max_items_per_request": 3}):
        answer = call(url, "score", query, items, client=WITH_KEY | split, label_token_ids=labels)
        same(answer.scores, expected.scores)
        assert np.isnan(answer.scores[1, 1:]).all()
    one_list = call(url, "score", query, items, client=WITH_KEY, label_token_ids=np.array([1, 2]))
    same(one_list.scores[0], expected.scores[0, :2])


@pytest.mark.parametrize("split", [{}, *SMALL])
def test_labels_of_several_tokens(url, scorer, call, split):
    texts = [" lamp", " steel lamp", " wooden chair", "yes"]
    ids = [[1003], np.array([1034, 1003]), (631, 956), [294]]
    for labels, names in (
        ({"labels": texts}, texts),
        ({"label_sequences": ids}, ["1003", "1034 1003", "631 956", "294"]),
    ):
        for mean in ("none", "mean"):
            options = labels | {"logprobs": True, "label_length_normalization": mean}
            expected = scorer.score(QUERY, ITEMS, **options)
            answer = call(url, "score", QUERY, ITEMS, client=WITH_KEY | split, **options)
            for name in ("scores", "logprobs", "label_mass"):
                np.testing.assert_allclose(
                    getattr(answer, name), getattr(expected, name), atol=1e-4, rtol=0
                )
            assert [*answer.labels] == [*expected.labels] == names


def test_requests_keep_within_both_limits(url):
    """Requests are counted as they leave the client."""
    bodies = []
    hooks = {"request": [lambda request: bodies.append(request.content)]}
    items = [*"abcdefgh", *(f"{i} a wooden chair, blue and red" for i in range(6)), "chair" * 40]
    with httpx.Client(event_hooks=hooks) as http:
        options = {"max_items_per_request": 5, "max_bytes_per_request": 170}
        client = Client(url, KEY, http=http, max_concurrent_requests=1, **options)
        client.score(QUERY, items, labels=LABELS)
    counts = [len(json.loads(body)["items"]) for body in bodies]
    assert counts[0] == max(counts) == 5, "the limit of items applies"
    assert min(counts[1:-1]) < 4, "the limit of bytes applies"
    *within, last = map(len, bodies)
    assert max(within) <= 170 < last, "one item is larger than that"
    assert len(within) == 4, "the items must be split into as few requests as possible"


@pytest.mark.parametrize("split", [{}, *SMALL])
def test_a_split_ranking_is_one_ranking(url, scorer, call, split):
    prompts = [f"query: a blue lamp\nitem: {item}" for item in ITEMS]
    relevance = scorer.score("", prompts, labels=LABELS, apply_softmax=True).scores[:, 0]
    order = np.argsort(-relevance, kind="stable")
    client = WITH_KEY | split
    documents = [{"text": item} if i % 2 else item for i, item in enumerate(ITEMS)]
    answer = call(url, "rerank", "a blue lamp", documents, client=client)
    assert answer.indices.tolist() == order.tolist()
    np.testing.assert_allclose(answer.scores, relevance[order], atol=1e-6)
    assert answer.documents == tuple(documents[i] for i in order)
    assert not answer.truncated.any()
    best = call(url, "rerank", "a blue lamp", ITEMS, client=client, top_n=4, raw_scores=True)
    assert best.indices.tolist() == order[:4].tolist()
    assert best.documents == tuple(ITEMS[i] for i in order[:4])
    assert best.scores[0] > 1


def test_equal_documents_keep_their_order_over_requests(url, call):
    client = WITH_KEY | {"max_items_per_request": 2}
    answer = call(url, "rerank", "lamp", ["rug", "lamp", "lamp", "lamp", "rug"], client=client)
    assert answer.indices.tolist() == [1, 2, 3, 0, 4]


def test_what_was_cut_is_told(url, call):
    documents = ["lamp", "blue lamp " * 30, "rug"]
    client = WITH_KEY | {"max_items_per_request": 1}
    answer = call(url, "rerank", "lamp", documents, client=client, max_tokens_per_doc=5)
    assert {int(i) for i in answer.indices[answer.truncated]} == {1}


def test_nothing_to_score(url, call):
    answer = call(url, "score", QUERY, [], client=WITH_KEY, labels=LABELS, logprobs=True)
    assert answer.scores.shape == (0, 0)
    with pytest.raises(StatusError) as caught:
        call(url, "rerank", "lamp", [], client=WITH_KEY)
    assert caught.value.status == 400


def test_models_and_readiness(url, call):
    (model,) = call(url, "models", client=WITH_KEY)
    assert (model.id, model.max_model_len) == ("demo", 4096)
    assert call(url, "ready") is True
    assert call("http://127.0.0.1:9", "ready") is False


def test_errors_say_what_and_which(url, call):
    with pytest.raises(StatusError) as caught:
        call(url, "classify", ["a"], client=WITH_KEY, labels=["yes", "yes"], request_id="r-1")
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_request", "labels[1]")
    assert error.request_id == "r-1"
    assert "r-1" in str(error)
    assert "the same as labels[0]" in error.message
    with pytest.raises(StatusError) as caught:
        call(url, "models", client={"api_key": "another"})
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_the_server_learns_the_timeout(url, call):
    long = " ".join(["lamp"] * 2000)
    with pytest.raises(StatusError) as caught:
        call(url, "rerank", "lamp", [long], client=WITH_KEY | {"timeout": 0.002})
    assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
    with pytest.raises(StatusError) as caught:
        call(url, "rerank", "lamp", ["lamp"], client=WITH_KEY | {"timeout": 500})
    assert caught.value.param == "X-Request-Timeout-Ms"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"label_token_ids": [[1], [2], [3]]}, ValueError),
        ({"label_token_ids": [[1], 2]}, InvalidRequest),
        ({"label_token_ids": [[1.5], [2]]}, InvalidRequest),
        ({"lables": ["yes"]}, TypeError),
    ],
)
def test_what_cannot_be_sent(call, options, error):
    with pytest.raises(error):
        call("http://127.0.0.1:9", "score", "q", ["a", "b"], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"deadline": 0},
        {"max_attempts": 0},
        {"max_items_per_request": 0},
        {"max_concurrent_requests": 0},
    ],
)
def test_options_out_of_range(call, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        call("http://127.0.0.1:9", "ready", client=options)
    with pytest.raises(ValueError, match="url"):
        call("127.0.0.1:9", "ready")


def test_a_refused_connection_is_an_error_with_the_request_id(call):
    with pytest.raises(ConnectionFailed) as caught:
        call("http://127.0.0.1:9", "models", client={"max_attempts": 2})
    assert caught.value.request_id
