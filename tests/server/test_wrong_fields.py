"""Promise: a wrong field, token or model of a request is refused by name.

Afterwards both servers still answer the canary request as they did at the start.
"""

import json

import pytest

from support.connections import MARKER, check_error, large_request, post, score
from support.error_table import GOOD, covers, table
from support.models import VOCAB

pytestmark = pytest.mark.usefixtures("unharmed")


class TestFields:
    """Wrong types, wrong values, wrong combinations."""

    INTEGERS = {
        "true": "true",
        "float": "1.0",
        "exponent": "1e0",
        "text": '"1"',
        "null": "null",
        "nested": "[[1]]",
        "NaN": "NaN",
        "-Infinity": "-Infinity",
        "1e400": "1e400",
        "2^63": str(2**63),
        "below int64": str(-(2**63) - 1),
        "2^64": str(2**64),
        "10^400": str(10**400),
        "5000 digits": "9" * 5000,
    }

    LISTS = (
        '"query":[%s]',
        '"query":[-1,%s,5]',
        '"items":[[7],[-1,%s]]',
        '"label_token_ids":[3,%s,-1]',
        '"label_token_ids":[[3],[%s]]',
        '"label_sequences":[[3],[4,%s]]',
    )

    @pytest.mark.parametrize("value", table("invalid_request", INTEGERS))
    def test_integers_are_json_integers_within_int64(self, client, value):
        for field in self.LISTS:
            name = field.split('"')[1]
            kept = [key for key in GOOD if key != name and not (key + name).count("label") > 1]
            others = json.dumps({key: GOOD[key] for key in kept})
            sent = f"{others[:-1]},{field % value}}}"
            check_error(post(client, sent.encode()), 400, "invalid_request")

    # Each value: the body's field as JSON text, because json.dumps would not write all of them, and
    # the expected `param`. test_fields.py has all fields with values of other types.
    VALUES = {
        "items: missing": ('"items":null', "items"),
        "items: null": ('"items":[[1],null]', "items[1]"),
        "label_token_ids: both kinds": ('"label_token_ids":[3,[4]]', "label_token_ids"),
        "label_token_ids: too few lists": ('"label_token_ids":[[3]]', "label_token_ids"),
        "label_token_ids: too many lists": ('"label_token_ids":[[3],[4],[5]]', "label_token_ids"),
        "labels beside ids": ('"labels":["y"]', "labels"),
        "no labels beside ids": ('"labels":[]', "labels"),
        "temperature without softmax": ('"temperature":2.0', "temperature"),
        "temperature 0": ('"apply_softmax":true,"temperature":0', "temperature"),
        "temperature below 0": ('"apply_softmax":true,"temperature":-0.5', "temperature"),
        "temperature 1e400": ('"apply_softmax":true,"temperature":1e400', "temperature"),
        "temperature 10^400": (f'"apply_softmax":true,"temperature":{10**400}', "temperature"),
        "temperature NaN": ('"apply_softmax":true,"temperature":NaN', None),
        "salt: a line break": ('"cache_salt":"a\\n"', "cache_salt"),
        "priority 10^400": (f'"priority":{10**400}', "priority"),
        "priority of 5000 digits": (f'"priority":{"9" * 5000}', "priority"),
        "unknown field": ('"top_k":5', "top_k"),
        "unknown field, nasty name": (f'"<{MARKER}>":5', None),
        "unknown field, empty name": ('"":5', None),
        "unknown field, name with a break": (f'"a\\n{MARKER}":5', None),
        "unknown field, quotes in its name": (f'"` - at `$.{MARKER}`":5', None),
        "unknown field, 1 MB": (f'"{"x" * 10**6}":5', None),
    }

    @pytest.mark.parametrize(("field", "param"), table("invalid_request", VALUES))
    def test_value(self, client, field, param):
        sent = f"{json.dumps(GOOD)[:-1]},{field}}}"  # the last of duplicate keys counts
        message = check_error(post(client, sent.encode()), 400, "invalid_request", param)
        if param is not None:
            assert param.split("[")[0] in message

    @pytest.mark.parametrize(
        ("path", "name", "values"),
        [
            ("/v1/score", "on_error", "fail, null"),
            ("/rerank", "on_error", "fail, null"),
            ("/v1/score", "label_length_normalization", "none, mean"),
        ],
    )
    def test_a_wrong_choice_gets_the_valid_ones(self, client, path, name, values):
        message = check_error(client.post(path, json={name: MARKER}), 400, "invalid_request", name)
        assert message == f"{name}: must be one of {values}"

    @pytest.mark.parametrize(
        ("path", "name", "meant"),
        [
            ("/v1/score", "apply_soft_max", "apply_softmax"),
            ("/v1/score", "label_tokens_ids", "label_token_ids"),
            ("/rerank", "document", "documents"),
            ("/v1/classify", "inputs", "input"),
            ("/rerank", "instructions", "instruction"),
            ("/v1/completions", "promt", "prompt"),
            ("/tokenize", "promt", "prompt"),
            ("/v1/score", "zzzzzz", None),
        ],
    )
    def test_a_misspelt_field_gets_the_closest_one(self, client, path, name, meant):
        message = check_error(client.post(path, json={name: 1}), 400, "invalid_request", name)
        assert message == f"unknown field {name}" + (f"; did you mean {meant}?" if meant else "")

    @pytest.mark.parametrize(
        "labels",
        table(
            "missing_labels",
            {"none": {}, "null": {"label_token_ids": None, "labels": None}},
        ),
    )
    @pytest.mark.parametrize("items", [["a"], []])
    def test_no_labels_at_all(self, client, labels, items):
        check_error(score(client, items=items, **labels), 400, "missing_labels")

    EMPTY = {
        "ids": ({"label_token_ids": []}, "label_token_ids"),
        "texts": ({"labels": []}, "labels"),
        "a list of its own": ({"label_token_ids": [[3], []]}, "label_token_ids[1]"),
    }

    @pytest.mark.parametrize(("labels", "param"), table("empty_labels", EMPTY))
    def test_no_label_in_the_list(self, client, labels, param):
        check_error(score(client, items=["a", "b"], **labels), 400, "empty_labels", param)

    MIXED = {
        "id query": {"query": [5], "items": [MARKER]},
        "items": {"items": [[5], MARKER]},
    }

    @pytest.mark.parametrize("body", table("mixed_input_types", MIXED))
    def test_text_and_ids_do_not_mix(self, client, body):
        reply = score(client, **body, label_token_ids=[3])
        check_error(reply, 400, "mixed_input_types", "items")


class TestTokens:
    OUT_OF_RANGE = {
        "label -1": ({"label_token_ids": [3, -1]}, "label_token_ids"),
        "label at the bound": ({"label_token_ids": [VOCAB]}, "label_token_ids"),
        "query at the bound": ({"query": [5, VOCAB]}, "query"),
        "item -1": ({"items": [[5], [6, -1]]}, "items[1]"),
        "2^32 + 5": ({"label_token_ids": [2**32 + 5]}, "label_token_ids"),
    }

    @pytest.mark.parametrize(("fields", "param"), table("token_id_out_of_range", OUT_OF_RANGE))
    def test_token_id(self, client, fields, param):
        body = GOOD | fields
        message = check_error(score(client, **body), 400, "token_id_out_of_range", param)
        assert message.endswith(f"valid are 0 to {VOCAB - 1}")

    @covers("empty_prompt")
    def test_a_prompt_of_no_token(self, client, limited):
        empty_ids = {"items": [[5], []], "label_token_ids": [3]}
        check_error(score(client, **empty_ids), 400, "empty_prompt", "items[1]")
        check_error(score(client, **empty_ids, item_first=True), 400, "empty_prompt", "items[1]")
        # The limited server's tokenizer puts no token before a text.
        for items, param in (([""], "items[0]"), ("", "items[0]"), (["a", ""], "items[1]")):
            reply = score(limited, items=items, label_token_ids=[3])
            check_error(reply, 400, "empty_prompt", param)
        assert score(client, items="", label_token_ids=[3]).status_code == 200, "<s> alone"

    @covers("prompt_too_long")
    @pytest.mark.parametrize("item_first", [False, True])
    def test_a_prompt_over_the_context(self, client, item_first):
        body = {"query": [5] * 500, "label_token_ids": [3], "item_first": item_first}
        assert score(client, **body, items=[[6] * 12]).status_code == 200
        reply = score(client, **body, items=[[6] * 12, [6] * 13, [6]])
        message = check_error(reply, 400, "prompt_too_long", "items[1]")
        assert "items[1]" in message
        assert "513" in message
        assert "512" in message

    def test_a_text_over_the_context(self, client, encode):
        assert len(encode("☃☃☃" * 300)) > 512
        reply = score(client, query="☃☃☃" * 300, items=["a", MARKER], label_token_ids=[3])
        message = check_error(reply, 400, "prompt_too_long", "items[0]")
        assert f"{len(encode('☃☃☃' * 300 + 'a'))} tokens" in message
        assert "512" in message

    @covers("too_many_items")
    @pytest.mark.parametrize("item", [[5], "a", []])
    def test_items_over_the_limit(self, client, item):
        reply = score(client, query="", items=[item] * 10_001, label_token_ids=[3])
        message = check_error(reply, 400, "too_many_items", "items")
        assert "10001" in message
        assert "10000" in message

    LABELS = {
        "ids": ({"label_token_ids": [3] * 129}, "label_token_ids"),
        "texts": ({"labels": ["y"] * 129}, "labels"),
        "of one item": ({"label_token_ids": [[3], [3] * 129]}, "label_token_ids[1]"),
    }

    @pytest.mark.parametrize(("labels", "param"), table("too_many_labels", LABELS))
    def test_labels_over_the_limit(self, client, labels, param):
        reply = score(client, items=["a", "b"], **labels)
        message = check_error(reply, 400, "too_many_labels", param)
        assert "129" in message
        assert "128" in message

    @covers("too_many_tokens")
    def test_tokens_over_the_limit(self, client):
        body = large_request(1_048_576 + 500)
        message = check_error(post(client, body), 400, "too_many_tokens", "items")
        assert "1048576" in message
        assert str(500 * ((1_048_576 + 500) // 500)) in message


class TestModel:
    @covers("model_not_found")
    @pytest.mark.parametrize("name", [MARKER, "", "Default", "tiny ", "x" * 100_000])
    def test_another_model(self, client, name):
        reply = score(client, **GOOD, model=name)
        check_error(reply, 404, "model_not_found", "model")
