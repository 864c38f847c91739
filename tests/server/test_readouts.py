"""Promise: with score_extraction_token each item has a row per occurrence over real HTTP, and
whatever is wrong with it is named with its place."""

import numpy as np
import pytest

from support.connections import score
from support.error_table import covers
from support.models import random_ids, reference_logprobs

LABELS = [3, 17, 399]
QUERY = "query: a quite blue wooden chair\n"
ITEMS = ["A red chair.<|end|>A lamp.<|end|>", "<|end|><|end|>", "yes\n\u2603 no<|end|> maybe"]
END = 1  # the id of <|end|>


def words(rng, count):
    return [max(id, 2) for id in random_ids(rng, count)]


def ask(client, **body):
    reply = score(client, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def expected_rows(model, prompts, skipped=0, token=END):
    """Return log-probabilities after each occurrence in each prompt, after its first tokens."""
    return [
        reference_logprobs(
            model, [p[: n + 1] for n, id in enumerate(p) if id == token and n >= skipped]
        )
        for p in prompts
    ]


@pytest.mark.parametrize(
    "given", [{"score_extraction_token": "<|end|>"}, {"score_extraction_token_id": END}]
)
def test_texts(client, model, encode, given):
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": [*LABELS, 3]} | given
    answer = ask(client, **body, return_label_logprobs=True, return_label_mass=True)
    prompts = [encode(QUERY + item) for item in ITEMS]
    expected = expected_rows(model[1], prompts)
    assert [*map(len, answer["scores"])] == [2, 2, 1]
    softmax = ask(client, **body, apply_softmax=True, temperature=2)["scores"]
    for number, rows in enumerate(expected):
        logs = rows[:, [*LABELS, 3]]
        near = {"atol": 1e-4, "rtol": 0}
        np.testing.assert_allclose(np.log(answer["scores"][number]), logs, **near)
        np.testing.assert_allclose(answer["label_logprobs"][number], logs, **near)
        masses = np.exp(rows[:, LABELS]).sum(axis=1)
        np.testing.assert_allclose(answer["label_mass"][number], masses, **near)
        weights = np.exp(logs / 2)
        shares = weights / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(softmax[number], shares, **near)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    plain = score(client, query=QUERY, items=ITEMS, label_token_ids=LABELS).json()
    assert plain["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_beginnings_and_labels_of_several_tokens(client, model, rng):
    """The items share a beginning that holds the token, which so moves out of the query."""
    query, start = words(rng, 9), [*words(rng, 5), END]
    items = [start + words(rng, n) + [END] for n in (3, 1)]
    labels = [[12, 7], [12], [9, 9, 4]]
    answer = ask(
        client,
        query=query,
        items=items,
        label_sequences=labels,
        score_extraction_token_id=END,
        label_length_normalization="mean",
        return_label_mass=True,
    )
    for item, rows, masses in zip(items, answer["scores"], answer["label_mass"], strict=True):
        prompt = query + item
        ends = [prompt[: n + 1] for n, id in enumerate(prompt) if id == END]
        for end, row, mass in zip(ends, rows, masses, strict=True):
            sums = []
            for label in labels:
                starts = [end + label[:n] for n in range(len(label))]
                after = reference_logprobs(model[1], starts)
                sums.append(after[range(len(label)), label].sum())
            np.testing.assert_allclose(np.log(row), np.array(sums) / [2, 1, 3], atol=1e-4, rtol=0)
            np.testing.assert_allclose(mass, np.exp(sums[1:]).sum(), atol=1e-4, rtol=0)


@covers("no_extraction_token")
def test_an_item_without_the_token(client):
    body = {"query": [5, 6], "items": [[7, END], [8, 9], None], "label_token_ids": LABELS}
    reply = score(client, **body | {"items": body["items"][:2]}, score_extraction_token_id=END)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("no_extraction_token", "items[1]")
    more = {"return_label_logprobs": True, "return_label_mass": True}
    answer = ask(client, **body, **more, score_extraction_token_id=END, on_error="null")
    for field in ("scores", "label_logprobs", "label_mass"):
        assert [entry is None for entry in answer[field]] == [False, True, True]
        assert len(answer[field][0]) == 1
    assert [(e["index"], e["code"]) for e in answer["errors"]] == [
        (1, "no_extraction_token"),
        (2, "invalid_request"),
    ]
    assert answer["usage"]["prompt_tokens"] == 4
    none = ask(
        client, **body | {"items": [[8], [9]]}, score_extraction_token_id=END, on_error="null"
    )
    assert none["scores"] == [None, None]
    assert ask(client, **body | {"items": []}, score_extraction_token_id=END)["scores"] == []


WRONG = {
    "two tokens": ({"score_extraction_token": "yes\n\u2603"}, "score_extraction_token", "tokens"),
    "no token": ({"score_extraction_token": ""}, "score_extraction_token", "is 0 tokens"),
    "both": (
        {"score_extraction_token": "<|end|>", "score_extraction_token_id": END},
        "score_extraction_token",
        "exclude each other",
    ),
    "too large": ({"score_extraction_token_id": 400}, "score_extraction_token_id", "0 to 399"),
    "negative": ({"score_extraction_token_id": -1}, "score_extraction_token_id", "0 to 399"),
    "over 64 bits": ({"score_extraction_token_id": 2**64}, "score_extraction_token_id", ""),
    "item first": (
        {"score_extraction_token_id": END, "item_first": True},
        "item_first",
        "score_extraction_token cannot be used with item_first",
    ),
    "in the query": (
        {"score_extraction_token_id": END, "query": [5, 6, END]},
        "query",
        "token 2 of the query",
    ),
    "in the query's text": (
        {"score_extraction_token_id": END, "query": "a<|end|>", "items": ["b<|end|>"]},
        "query",
        "is the extraction token, 1",
    ),
    "a query that is too long": (
        {"score_extraction_token_id": END, "query": "ab " * 60_000, "items": ["b<|end|>"] * 2},
        "items[0]",
        "items[0] gives a prompt of at least",
    ),
    "before every text": (
        {"score_extraction_token_id": 0, "query": "", "items": ["b<s>"]},
        "query",
        "token 0 of the query",
    ),
    "of another type": ({"score_extraction_token": 1}, "score_extraction_token", "str"),
}


@pytest.mark.parametrize(("fields", "param", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(client, fields, param, message):
    body = {"query": [5, 6], "items": [[7, END]], "label_token_ids": LABELS}
    reply = score(client, **body | fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert message in reply.json()["error"]["message"]


def test_too_many_scores(client):
    body = {"query": [5], "items": [[END] * 500] * 80, "label_token_ids": [3] * 128}
    reply = score(client, **body, score_extraction_token_id=END)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "5120000 scores, the limit is 4194304"
