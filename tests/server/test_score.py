"""Promise: the fields of POST /v1/score mean what the contract says, over real HTTP."""

import json
from uuid import uuid4

import numpy as np
import pytest
from tokenizers import Tokenizer

from support.connections import Connection, hold, large_request, post, score
from support.models import VOCAB, random_ids, reference_logprobs

TOLERANCE = 1e-4
LABELS = [3, 17, 399]
QUERY = "query: a quite blue wooden chair 3.14159 for the gar"
ITEMS = ["den", "", "den item: The chair", "ém ☃\n", "den", "<|end|>", "\x00 yes", "😀"]


def ask(client, **body):
    """Return the answer of a request that must succeed and that finds nothing in the prefix
    cache."""
    reply = score(client, cache_salt=uuid4().hex, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_values(answer, expected, labels=LABELS):
    np.testing.assert_allclose(
        np.log(answer["scores"]), expected[:, labels], atol=TOLERANCE, rtol=0
    )


class TestValues:
    """Scores equal transformers' within 1e-4 in log p."""

    @pytest.mark.parametrize("item_first", [False, True])
    def test_token_ids(self, client, model, rng, item_first):
        query, items = random_ids(rng, 67), [random_ids(rng, n) for n in (1, 2, 20, 63, 111, 3)]
        answer = ask(
            client, query=query, items=items, label_token_ids=LABELS, item_first=item_first
        )
        prompts = [item + query if item_first else query + item for item in items]
        check_values(answer, reference_logprobs(model[1], prompts))

    @pytest.mark.parametrize("kind", ["text", "ids"])
    def test_an_item_does_not_depend_on_its_company(self, client, rng, kind):
        items = [f"{n} item: chair {n * n}" for n in range(33)]
        query = QUERY
        if kind == "ids":
            query, items = random_ids(rng, 40), [random_ids(rng, 1 + n % 9) for n in range(33)]
        together = ask(client, query=query, items=items, label_token_ids=LABELS)["scores"]
        backwards = ask(client, query=query, items=items[::-1], label_token_ids=LABELS)["scores"]
        np.testing.assert_allclose(
            np.log(together), np.log(backwards[::-1]), atol=TOLERANCE, rtol=0
        )
        for some in ([0], [32], [5, 20]):
            alone = ask(
                client, query=query, items=[items[i] for i in some], label_token_ids=LABELS
            )["scores"]
            np.testing.assert_allclose(
                np.log(alone), np.log([together[i] for i in some]), atol=TOLERANCE, rtol=0
            )

    def test_10000_items(self, client, rng):
        query, items = random_ids(rng, 20), [random_ids(rng, 1 + n % 3) for n in range(10000)]
        scores = ask(client, query=query, items=items, label_token_ids=LABELS)["scores"]
        assert len(scores) == 10000
        few = [0, 1, 4999, 9999]
        alone = ask(client, query=query, items=[items[i] for i in few], label_token_ids=LABELS)
        np.testing.assert_allclose(
            np.log(alone["scores"]), np.log([scores[i] for i in few]), atol=TOLERANCE, rtol=0
        )


class TestItems:
    @pytest.mark.parametrize("query", ["", [], None])
    def test_an_empty_query_fits_either_kind(self, client, model, query):
        answer = ask(client, query=query, items=[[5, 6]], label_token_ids=LABELS)
        check_values(answer, reference_logprobs(model[1], [[5, 6]]))
        assert ask(client, query=query, items=["yes"], label_token_ids=LABELS)["scores"]

    @pytest.mark.parametrize("query", ["", "yes", [], [5]])
    @pytest.mark.parametrize("labels", [{"label_token_ids": LABELS}, {"labels": ["y"]}])
    def test_no_items_is_an_empty_answer(self, client, query, labels):
        asked = {"return_label_logprobs": True, "return_label_mass": True}
        assert ask(client, query=query, items=[], **labels, **asked) == {
            "scores": [],
            "model": "tiny",
            "object": "scoring",
            "usage": usage(0, 0),
            "label_logprobs": [],
            "label_mass": [],
        }


class TestLabels:
    def test_one_list_per_item(self, client, model, rng):
        query, items = random_ids(rng, 20), [random_ids(rng, 4) for _ in range(3)]
        labels = [[5], [7, 7, 9], [399, 0]]
        logprobs = reference_logprobs(model[1], [query + item for item in items])
        for softmax in (False, True):
            answer = ask(
                client, query=query, items=items, label_token_ids=labels, apply_softmax=softmax
            )
            for row, ids, logp in zip(answer["scores"], labels, logprobs, strict=True):
                p = np.exp(logp[ids])
                expected = p / p.sum() if softmax else p
                np.testing.assert_allclose(row, expected, atol=TOLERANCE, rtol=0)

    @pytest.mark.parametrize("softmax", [False, True])
    def test_a_label_listed_twice_has_two_equal_columns(self, client, softmax):
        once, twice = (
            ask(client, items=[[5]], label_token_ids=ids, apply_softmax=softmax)["scores"][0]
            for ids in ([3, 9], [3, 9, 3])
        )
        assert twice[0] == twice[2]
        weights = np.array([once[0], once[1], once[0]])
        np.testing.assert_allclose(twice, weights / weights.sum() if softmax else weights)

    def test_the_weights_bound_the_ids_not_the_tokenizer(self, client, model):
        tokenizer = Tokenizer.from_file(str(model[0] / "tokenizer.json"))
        assert tokenizer.get_vocab_size() <= VOCAB - 8
        ids = [0, 1, VOCAB - 1]  # <s>, <|end|>, and one that only the weights have
        answer = ask(client, query=[VOCAB - 1], items=[[VOCAB - 1, 0]], label_token_ids=ids)
        check_values(answer, reference_logprobs(model[1], [[VOCAB - 1, VOCAB - 1, 0]]), ids)


class TestScores:
    def test_softmax_renormalises_the_default(self, client):
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
        plain = np.array(ask(client, **body)["scores"])
        softmax = np.array(ask(client, **body, apply_softmax=True)["scores"])
        assert (plain.sum(axis=1) < 0.99).all()
        np.testing.assert_allclose(softmax.sum(axis=1), 1, atol=1e-12)
        np.testing.assert_allclose(softmax, plain / plain.sum(axis=1, keepdims=True), rtol=1e-4)

    @pytest.mark.parametrize("temperature", [0.1, 1, 2.5, 1e300])
    def test_temperature(self, client, temperature):
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "apply_softmax": True}
        plain = np.array(ask(client, **body)["scores"])
        warm = np.array(ask(client, **body, temperature=temperature)["scores"])
        weights = plain ** (1 / temperature)
        np.testing.assert_allclose(warm, weights / weights.sum(axis=1, keepdims=True), rtol=1e-6)

    @pytest.mark.parametrize("softmax", [False, True])
    def test_label_logprobs(self, client, model, encode, softmax):
        answer = ask(
            client,
            query=QUERY,
            items=ITEMS,
            label_token_ids=LABELS,
            apply_softmax=softmax,
            return_label_logprobs=True,
        )
        expected = reference_logprobs(model[1], [encode(QUERY + item) for item in ITEMS])
        np.testing.assert_allclose(
            answer["label_logprobs"], expected[:, LABELS], atol=TOLERANCE, rtol=0
        )
        assert "label_mass" not in answer

    @pytest.mark.parametrize("softmax", [False, True])
    def test_label_mass_counts_distinct_labels(self, client, softmax):
        body = {"query": QUERY, "items": ITEMS}
        plain = np.array(ask(client, **body, label_token_ids=LABELS)["scores"])
        answer = ask(
            client,
            **body,
            label_token_ids=[*LABELS, LABELS[0]],
            apply_softmax=softmax,
            return_label_mass=True,
        )
        np.testing.assert_allclose(answer["label_mass"], plain.sum(axis=1), rtol=1e-6)
        assert "label_logprobs" not in answer


class TestDefaults:
    def test_null_means_default(self, client):
        body = {"items": ["yes"], "label_token_ids": LABELS}
        nulls = {
            "query": None,
            "labels": None,
            "apply_softmax": None,
            "temperature": None,
            "item_first": None,
            "model": None,
            "return_label_logprobs": None,
            "return_label_mass": None,
            "cache_salt": None,
            "priority": None,
        }
        spelt_out = {
            "query": "",
            "apply_softmax": False,
            "temperature": 1.0,
            "item_first": False,
            "model": "default",
            "return_label_logprobs": False,
            "return_label_mass": False,
            "priority": 0,
        }
        replies = [score(client, **(body | more)) for more in ({}, nulls, spelt_out)]
        assert [reply.status_code for reply in replies] == [200, 200, 200]
        scores = [reply.json()["scores"] for reply in replies]
        assert scores[0] == scores[1] == scores[2]
        assert set(replies[0].json()) == {"scores", "model", "usage", "object"}
        nulls = {"items": ["yes"], "labels": ["y"], "label_token_ids": None}
        assert score(client, **nulls).status_code == 200

    def test_of_duplicate_keys_the_last_one_counts(self, client):
        first = b'{"items":[[1]],"label_token_ids":[4],"items":[[5]],"label_token_ids":[3,17,399]}'
        reply = post(client, first)
        assert reply.status_code == 200
        expected = ask(client, items=[[5]], label_token_ids=LABELS)
        assert reply.json()["scores"] == expected["scores"]

    @pytest.mark.parametrize(
        "content_type",
        ["application/json", "Application/JSON; charset=UTF-8", "application/json;charset=utf-8"],
    )
    def test_json_in_utf8_under_its_names(self, client, content_type):
        body = json.dumps({"items": ["é☃😀"], "label_token_ids": LABELS}, ensure_ascii=False)
        assert post(client, body.encode(), content_type=content_type).status_code == 200


class TestAnswer:
    def test_its_shape(self, client):
        answer = ask(client, query=[5, 6], items=[[7], [8, 9]], label_token_ids=[3])
        assert list(answer) == ["scores", "model", "usage", "object"]
        assert answer["object"] == "scoring"
        assert all(isinstance(value, float) for row in answer["scores"] for value in row)

    def test_the_model_is_echoed(self, client, model):
        for name in ("default", "tiny", str(model[0])):
            answer = ask(client, model=name, items=[[5]], label_token_ids=[3])
            assert answer["model"] == name
        assert ask(client, items=[[5]], label_token_ids=[3])["model"] == "tiny"

    def test_usage_counts_every_prompt_as_if_alone(self, client):
        body = {"query": [5] * 40, "label_token_ids": [3]}
        alone = ask(client, **body, items=[[7, 8]])["usage"]
        assert alone == usage(42, 0)
        three = ask(client, **body, items=[[7, 8], [9], [10, 11, 12]])["usage"]
        assert three == usage(126, 80), "the query is computed once"
        assert ask(client, **body, items=[[], [9]])["usage"] == usage(81, 39)

    def test_usage_counts_what_the_prefix_cache_held(self, client):
        body = {"query": [5] * 40, "items": [[7, 8], [9]], "label_token_ids": [3]}
        for cached in (40, 40 + 32, 40 + 32):  # two full pages of 16 tokens
            answer = score(client, **body, cache_salt="warm").json()
            assert answer["usage"] == usage(83, cached)

    def test_usage_counts_the_special_tokens_of_text(self, client, encode):
        items = ["den", "den item", "☃"]
        lengths = [len(encode(QUERY + item)) for item in items]
        answer = ask(client, query=QUERY, items=items, label_token_ids=[3])
        assert answer["usage"]["prompt_tokens"] == sum(lengths)

    @pytest.mark.parametrize("salt", ["a", "tenant-7_A.b", "x" * 64])
    def test_a_cache_salt_changes_no_score(self, client, salt):
        body = {"query": [5] * 70, "items": [[6], [7]], "label_token_ids": LABELS}
        plain = ask(client, **body)["scores"]
        for _ in range(2):
            salted = score(client, **body, cache_salt=salt)
            assert salted.status_code == 200
            np.testing.assert_allclose(
                np.log(salted.json()["scores"]), np.log(plain), atol=TOLERANCE, rtol=0
            )

    def test_a_lower_priority_number_overtakes(self, client):
        with Connection(client) as busy:
            hold(client, busy, large_request(600_000))
            # Too long for the rest of a batch of the large request: it needs a batch of its own.
            assert ask(client, items=[[9] * 400], label_token_ids=[3], priority=-1)
            assert busy.silent, "the large request is still being worked on"


def usage(prompt_tokens, cached_tokens):
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
