"""Promise: labels of several tokens over real HTTP are scored as transformers scores the
continuations, and usage, errors and metrics are as the contract says."""

import numpy as np
import pytest

from support.connections import check_error, post, score
from support.error_table import GOOD
from support.models import random_ids, reference_logprobs

TOLERANCE = 1e-4
LABELS = [[12, 7, 5], [12, 8], [9], [12], [9]]


def ask(client, **body):
    reply = score(client, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def continuations(model, prompts, labels):
    rows = []
    for prompt in prompts:
        logprobs = [
            reference_logprobs(model, [prompt + i[:n] for n in range(len(i))]) for i in labels
        ]
        rows.append(
            [rows[range(len(i)), i].sum() for rows, i in zip(logprobs, labels, strict=True)]
        )
    return np.array(rows)


def near(got, expected):
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("item_first", [False, True])
def test_sequences_of_ids(client, model, rng, item_first):
    query, items = random_ids(rng, 40), [random_ids(rng, n) for n in (1, 20, 3)]
    body = {"query": query, "items": items, "item_first": item_first, "label_sequences": LABELS}
    more = {"return_label_logprobs": True, "return_label_mass": True}
    answer = ask(client, **body, **more, cache_salt=f"cold-{item_first}")
    prompts = [item + query if item_first else query + item for item in items]
    expected = continuations(model[1], prompts, LABELS)
    assert expected.std() > 1
    near(answer["label_logprobs"], expected)
    near(np.log(answer["scores"]), expected)
    near(answer["label_mass"], np.exp(expected[:, [2, 3]]).sum(axis=1))
    tokens = sum(map(len, prompts))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    computed = 24 + 3 * 40 if item_first else 24 + 40
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens - computed
    softmax = ask(client, **body, apply_softmax=True, temperature=3)["scores"]
    shares = np.exp(expected / 3)
    near(softmax, shares / shares.sum(axis=1, keepdims=True))
    mean = ask(client, **body, label_length_normalization="mean", **more)
    near(np.log(mean["scores"]), expected / [3, 2, 1, 1, 1])
    near(mean["label_logprobs"], expected)
    near(mean["label_mass"], answer["label_mass"])
    assert ask(client, **body, label_length_normalization="none", **more)["scores"]


def test_texts(client, model, encode):
    labels = ["yes", "very relevant", "off topic"]
    ids = [encode(label)[1:] for label in labels]  # without <s>
    assert min(map(len, ids[1:])) > 1
    query, items = "query: a blue chair for the gar", ["den", " item: a lamp"]
    answer = ask(client, query=query, items=items, labels=labels, return_label_logprobs=True)
    expected = continuations(model[1], [encode(query + item) for item in items], ids)
    near(answer["label_logprobs"], expected)
    same = ask(client, query=query, items=items, label_sequences=ids, return_label_logprobs=True)
    near(same["label_logprobs"], expected)


def test_single_tokens_are_answered_as_ids_are(client):
    body = {"query": [5, 6], "items": [[7], [8, 9]], "return_label_mass": True}
    expected = ask(client, **body, label_token_ids=[3, 17, 3])
    assert ask(client, **body, label_sequences=[[3], [17], [3]])["scores"] == pytest.approx(
        np.array(expected["scores"]), abs=1e-6
    )


def test_the_context_is_usable_up_to_the_labels_last_token(client, model, rng):
    prompt = random_ids(rng, 511)
    body = {"label_sequences": [[3, 4], [5]], "return_label_logprobs": True}
    answer = ask(client, query=prompt[:300], items=[prompt[300:]], **body)
    near(answer["label_logprobs"], continuations(model[1], [prompt], [[3, 4], [5]]))
    items = [prompt[:5], [1, *prompt]]
    message = check_error(score(client, items=items, **body), 400, "prompt_too_long", "items[1]")
    assert "512 tokens, the limit is 512, less 1 for the labels" in message
    rest = ask(client, items=items, on_error="null", **body)
    assert rest["scores"][1] is None
    assert [error["code"] for error in rest["errors"]] == ["prompt_too_long"]
    near(rest["label_logprobs"][0], continuations(model[1], [prompt[:5]], [[3, 4], [5]])[0])


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"label_sequences": []}, "empty_labels", "label_sequences"),
        ({"label_sequences": [[3], []]}, "empty_labels", "label_sequences[1]"),
        ({"labels": ["y", ""]}, "empty_labels", "labels[1]"),
        ({"label_sequences": [[3, 400]]}, "token_id_out_of_range", "label_sequences[0]"),
        ({"label_sequences": [[3, -1]]}, "token_id_out_of_range", "label_sequences[0]"),
        ({"label_sequences": [[3]] * 129}, "too_many_labels", "label_sequences"),
        ({"label_sequences": [[3], [3] * 33]}, "too_many_tokens", "label_sequences[1]"),
        ({"labels": ["n\u2603" * 33]}, "too_many_tokens", "labels[0]"),
        ({"label_sequences": [[3]], "labels": ["y"]}, "invalid_request", "labels"),
        ({"label_sequences": [[3]], "label_token_ids": [3]}, "invalid_request", "label_sequences"),
        ({"label_sequences": [3]}, "invalid_request", "label_sequences[0]"),
        ({"label_sequences": [["a"]]}, "invalid_request", "label_sequences[0][0]"),
        ({"label_sequences": [[1.0]]}, "invalid_request", "label_sequences[0][0]"),
        (
            {"label_sequences": [[3]], "label_length_normalization": "sum"},
            "invalid_request",
            "label_length_normalization",
        ),
    ],
)
def test_errors(client, unharmed, fields, code, param):
    reply = score(client, query="a", items=["b"], **fields)
    message = check_error(reply, 400, code, param)
    if code == "too_many_tokens":
        assert "the limit is 32" in message


def test_the_limit_on_a_requests_tokens_counts_those_of_labels(client, unharmed):
    labels = [[first, *range(1, 32)] for first in range(10)]
    body = {"items": [[5]] * 4000, "label_sequences": labels}
    message = check_error(score(client, **body), 400, "too_many_tokens", "items")
    assert str(4000 * (1 + 10 * 31)) in message


def test_vllms_pairs_do_not_take_them(client):
    reply = post(client, b'{"text_1": "a", "text_2": "b", "label_sequences": [[3, 4]]}')
    assert reply.status_code == 400


def metric(client, name):
    (line,) = [
        candidate
        for candidate in client.get("/metrics").text.split("\n")
        if candidate.startswith(name + "{")
    ]
    return float(line.rpartition(" ")[2])


def test_metrics_count_the_tokens_of_labels_by_themselves(client, rng):
    names = [f"gpuscore_{name}_total" for name in ("label_tokens", "prompt_tokens")]
    before = [metric(client, name) for name in names]
    answer = ask(client, items=[random_ids(rng, 5)] * 3, label_sequences=LABELS)
    ask(client, **GOOD)
    after = [metric(client, name) for name in names]
    assert answer["usage"]["prompt_tokens"] == 15
    assert after[0] - before[0] == 3 * 2  # 12, and 12 7
    assert after[1] - before[1] > 15
