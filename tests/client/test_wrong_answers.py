"""Promise: the clients take no answer whose shape or numbers do not belong to the request."""

import json

import pytest

from client.conftest import USAGE, WHOLE
from gpuscore.client import BadAnswer
from support.scripted_server import Step, scripted


def answer(**fields):
    return WHOLE | fields


ERROR = {"index": 0, "code": "a", "message": "b"}
ROW, ROWS = {"labels": ["yes", "no"]}, {"labels": ["yes", "no"], "logprobs": True}
TWO = ("q", ["a", "b"])
LISTS = {"label_token_ids": [[1], [2, 3]]}
GOOD_ROWS = [[0.5, 0.5]] * 2
HUGE = float("inf")
WRONG_SCORES = [
    (ROW, {"scores": [[0.5, 0.5]]}),
    (ROW, {"scores": [[0.5, 0.5]] * 3}),
    (ROW, {"scores": [[0.5, 0.5, 0.5]] * 2}),
    (ROW, {"scores": [[0.5]] * 2}),
    (ROW, {"scores": [[0.5, 0.5], []]}),
    (ROW, {"scores": [["0.5", "0.5"]] * 2}),
    (ROW, {"scores": [[0.5, HUGE]] * 2}),
    (ROW, {"scores": [[0.5, None]] * 2}),
    (ROW, {"scores": {"a": 1}}),
    (ROW, {"scores": [None, [0.5, 0.5]]}),
    (ROW, {"scores": [None, [0.5, 0.5]], "errors": [ERROR]}),  # nobody asked for it
    (ROW | {"on_error": "null"}, {"scores": GOOD_ROWS, "errors": [ERROR]}),
    (ROW | {"on_error": "null"}, {"scores": [None] * 2, "errors": [ERROR] * 2}),
    (ROW | {"on_error": "null"}, {"scores": [None] * 2, "errors": [ERROR | {"index": -1}, ERROR]}),
    (ROW | {"on_error": "null"}, {"scores": [None, [0.5, 0.5]]}),
    (ROW | {"on_error": "null"}, {"scores": [None] * 2, "errors": [ERROR | {"index": 2}]}),
    (LISTS, {"scores": GOOD_ROWS}),
    (LISTS, {"scores": [[0.5, 0.5], [0.5]]}),
    ({}, {"scores": [[0.5], [0.5, 0.5]]}),
    ({}, {"scores": [[], []]}),
    (ROWS, {"scores": GOOD_ROWS}),
    (ROWS, {"scores": GOOD_ROWS, "label_logprobs": GOOD_ROWS}),
    (ROWS, {"scores": GOOD_ROWS, "label_mass": [0.5, 0.5]}),
    (ROWS, {"scores": GOOD_ROWS, "label_logprobs": GOOD_ROWS[:1], "label_mass": [0.5, 0.5]}),
    (ROWS, {"scores": GOOD_ROWS, "label_logprobs": [[-1.0]] * 2, "label_mass": [0.5, 0.5]}),
    (ROWS, {"scores": GOOD_ROWS, "label_logprobs": GOOD_ROWS, "label_mass": [0.5]}),
    (ROWS, {"scores": GOOD_ROWS, "label_logprobs": GOOD_ROWS, "label_mass": [[0.5], [0.5]]}),
    (ROW, {"scores": GOOD_ROWS, "usage": USAGE | {"prompt_tokens": -1}}),
    (ROW, {"scores": GOOD_ROWS, "usage": USAGE | {"prompt_tokens": 1.5}}),
    (ROW, {"scores": GOOD_ROWS, "model": 5}),
]


def wrong(call, body, method, *arguments, **options):
    text = body if isinstance(body, str) else json.dumps(body).replace("Infinity", "1e999")
    with scripted([Step(200, text)]) as server:
        with pytest.raises(BadAnswer, match="an answer that cannot be used: ") as caught:
            call(server.url, method, *arguments, **options)
        assert len(server.requests) == 1
    return str(caught.value)


@pytest.mark.parametrize(("options", "fields"), WRONG_SCORES)
def test_wrong_scores(call, options, fields):
    wrong(call, answer(**fields), "score", *TWO, **options)


@pytest.mark.parametrize("body", ["<html>", {"scores": GOOD_ROWS}])
def test_what_is_no_answer_to_scores(call, body):
    wrong(call, body, "score", *TWO, **ROW)


def test_the_error_has_numbers(call):
    said = wrong(call, answer(scores=[[0.5] * 3]), "score", "q", ["a"], labels=["yes"])
    assert "3 columns" in said
    assert "1 label" in said


def ranked(*indices, **more):
    return answer(results=[{"index": i, "relevance_score": 0.5} for i in indices], **more)


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (ranked(0), {}),
        (ranked(), {}),
        (ranked(0, 0), {}),
        (ranked(0, 2), {}),
        (ranked(-1, 0), {}),
        (ranked(0, 1), {"top_n": 1}),
        (ranked(), {"top_n": 1}),
        (ranked(1, errors=[ERROR]), {}),
        (ranked(0, errors=[ERROR]), {"on_error": "null"}),
        (ranked(1, errors=[ERROR] * 2), {"on_error": "null"}),
        (answer(results=[{"index": i, "relevance_score": HUGE} for i in (0, 1)]), {}),
        (answer(results=[{"index": i, "relevance_score": None} for i in (0, 1)]), {}),
        (answer(results=[{"index": float(i), "relevance_score": "1"} for i in (0, 1)]), {}),
    ],
)
def test_wrong_rankings(call, body, options):
    wrong(call, body, "rerank", *TWO, **options)


def paired(*scores):
    return [{"index": index, "object": "score", "score": score} for index, score in scores]


@pytest.mark.parametrize(
    "data",
    [
        paired((0, 0.5)),
        paired((1, 0.5), (0, 0.5)),
        paired((0, 0.5), (0, 0.5)),
        paired((0, 0.5), (1, None)),
        paired((0, 0.5), (1, HUGE)),
        paired((0, 0.5), (1, [0.5])),
    ],
)
def test_wrong_pairs(call, data):
    wrong(call, answer(data=data), "score_pairs", [("q", "a"), ("q", "b")])


CLASS = {"index": 0, "num_classes": 2, "label": "yes", "probs": [0.7, 0.3]}


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": ["yes", "no"], "data": []},
        {"labels": ["yes", "no"], "data": [CLASS] * 2},
        {"labels": ["yes"], "data": [CLASS]},
        {"labels": ["no", "yes"], "data": [CLASS]},
        {"labels": ["yes", "no"], "data": [CLASS | {"probs": [0.5]}]},
        {"labels": ["yes", "no"], "data": [CLASS | {"probs": [0.5, HUGE]}]},
        {"labels": ["yes", "no"], "data": [CLASS | {"label": "maybe"}]},
    ],
)
def test_wrong_classes(call, fields):
    wrong(call, answer(**fields), "classify", ["a"], labels=["yes", "no"])


TOKENS = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": None}
TOKENS |= {"text_offset": [0, 1]}


def completed(*logprobs):
    return answer(choices=[{"index": 0, "text": "a", "logprobs": logprob} for logprob in logprobs])


def test_right_completions_are_right(call):
    with scripted([Step(200, completed(TOKENS))]) as server:
        assert call(server.url, "completions", ["ab"]).completions[0].tokens == ("a", "b")


@pytest.mark.parametrize(
    "body",
    [
        completed(),
        completed(None),
        completed(TOKENS | {"token_logprobs": [None]}),
        completed(TOKENS | {"token_logprobs": [None, HUGE]}),
        completed(TOKENS | {"top_logprobs": [None]}),
        completed(TOKENS | {"top_logprobs": [None, {"b": HUGE}]}),
    ],
)
def test_wrong_completions(call, body):
    wrong(call, body, "completions", ["ab"])
