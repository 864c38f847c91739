"""Promise: labels of several tokens over real HTTP are scored as transformers scores the
continuations, and usage and metrics are as the contract says. tests/text/test_labels.py has the
errors."""

import numpy as np
import pytest

from support.connections import post, score
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
