"""Promise: over HTTP the real model's answers to real texts equal transformers' on whole
prompts in float32."""

import numpy as np
import pytest

from reference import CLOSE, PASSAGES, TEXTS

QUERY = "What happens when a process or a machine is lost?"
RELEVANCE = (
    "Judge whether a document is relevant to a query.\n\nQuery: {}\n\nDocument: {}\n\n"
    'Does the document meet the requirements? Answer only "yes" or "no".'
)
LETTERS = [" A", " B", " C", " D", " E"]
TOPICS = (
    "Which topic is the sentence about? A. memory B. the network C. files D. programming E. none "
    "of these\nSentence: "
)
LONG_LABELS = [
    " does not say",
    " answers it fully",
    " is about another matter",
    " answers a part of it",
    " can not help",
    " is wrong",
]


def post(client, path, **body):
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def log_odds(p):
    return np.log(p) - np.log1p(-p)


def test_relevance_of_240_passages_cold_and_cached(real, reference):
    """All in one request; every sixth is compared, and all have the same score from the cache."""
    body = {"query": QUERY, "documents": PASSAGES, "return_label_mass": True, "cache_salt": "240"}
    cold, cached = (post(real, "/v1/rerank", **body) for _ in range(2))
    tokens = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, cached)
    ]
    assert tokens[0] < tokens[1]
    assert len(cold["results"]) == len(PASSAGES) == 240
    scores = [result["relevance_score"] for result in cold["results"]]
    assert scores == sorted(scores, reverse=True)
    again = {result["index"]: result["relevance_score"] for result in cached["results"]}
    for result in cold["results"]:
        assert log_odds(again[result["index"]]) == pytest.approx(
            log_odds(result["relevance_score"]), abs=CLOSE
        )
        if result["index"] % 6:
            continue
        prompt = reference.chat(("user", RELEVANCE.format(QUERY, PASSAGES[result["index"]])))
        yes, no = reference.labels(prompt, ["yes", "no"])
        assert log_odds(result["relevance_score"]) == pytest.approx(yes - no, abs=2 * CLOSE)
        assert np.log(result["label_mass"]) == pytest.approx(np.logaddexp(yes, no), abs=CLOSE)


def test_choices_of_five(real, reference):
    items = [f"{sentence}\nAnswer:" for sentence in PASSAGES[::12]]
    scores = post(real, "/v1/score", query=TOPICS, items=items, labels=LETTERS)["scores"]
    expected = [reference.labels(reference.ids(TOPICS + item), LETTERS) for item in items]
    np.testing.assert_allclose(np.log(scores), expected, atol=CLOSE, rtol=0)
    assert np.std(expected, axis=0).min() > 0.1, "scores that say something of the sentence"


def test_labels_of_two_to_five_tokens(real, reference):
    labels = [*LONG_LABELS, " yes"]
    assert {len(reference.ids(label)) for label in labels} == {1, 2, 3, 4, 5}
    for text in TEXTS[:3]:
        query = f"Question: {text.query}\nSentence: "
        items = [f"{sentence}\nThis sentence" for sentence in text.items[:2]]
        scores = post(real, "/v1/score", query=query, items=items, labels=labels)["scores"]
        expected = [reference.labels(reference.ids(query + item), labels) for item in items]
        np.testing.assert_allclose(np.log(scores), expected, atol=CLOSE, rtol=0)


def test_completions_with_log_probabilities(real, reference):
    prompts = [" ".join(PASSAGES[:8]), " ".join(PASSAGES[8:13])]
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 5}
    for prompt, choice in zip(
        prompts, post(real, "/v1/completions", **body)["choices"], strict=True
    ):
        ids, told = reference.ids(prompt), choice["logprobs"]
        rows = reference.rows(ids)
        best = int(rows[-1].argmax())
        expected = [row[token] for row, token in zip(rows, [*ids[1:], best], strict=True)]
        np.testing.assert_allclose(told["token_logprobs"][1:], expected, atol=CLOSE, rtol=0)
        for row, top in zip(rows, told["top_logprobs"][1:], strict=True):
            five = sorted(top.values(), reverse=True)[:5]
            np.testing.assert_allclose(five, np.sort(row)[:-6:-1], atol=CLOSE, rtol=0)
