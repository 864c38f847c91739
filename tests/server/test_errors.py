"""Promise: the server gives every error of the contract's table, in one shape, and never echoes the
input.

After every test both servers still answer the canary as at the start, bit for bit.
"""

import asyncio
import gzip
import json
import os
import re
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from gpuscore import errors
from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.engine.engine import Engine
from gpuscore.server.api.app import create_app
from gpuscore.server.api.auth import ApiKeys
from gpuscore.server.service import LoadedModel, ScoringService
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from support.models import VOCAB
from support.serving import wait_until
from support.wire import (
    KEYS,
    MARKER,
    POISON,
    Connection,
    canary,
    check_error,
    connected,
    large_request,
    post,
    retry_after,
    score,
)

pytestmark = pytest.mark.usefixtures("unharmed")

GOOD = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [3, 17]}
TEXT = {"query": MARKER, "items": [f"{MARKER} a", "b"], "label_token_ids": [3, 17]}
URGENT = {"items": [[5]], "label_token_ids": [3], "apply_softmax": True, "priority": -1}
CHUNKED = "Transfer-Encoding: chunked"
COVERED: set[str] = set()


def covers(*codes):
    """Record that a test provokes these codes; `test_the_table_is_complete` reads the record."""
    COVERED.update(codes)
    return lambda test: test


def table(code, cases):
    """Return parameters for the cases, a dict of id -> one value or a tuple of values."""
    COVERED.add(code)
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), id=k) for k, v in cases.items()]


@contextmanager
def service_of(plan, directory):
    """Serve with a real engine in this process."""
    backend = create_backend(plan)
    engine = Engine(backend, EngineConfig())
    service = ScoringService(("tiny",))
    builder = PromptBuilder(TextEncoder.read(directory), backend.limits, RequestLimits())
    service.serve(LoadedModel(engine, builder))
    try:
        yield service
    finally:
        service.close()


def ask_app(service, body, path="/v1/score"):
    """Return the reply of an application in this process."""
    app = create_app(service, ServerConfig(), ApiKeys([]))

    async def send():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await (client.post(path, json=body) if "score" in path else client.get(path))

    return asyncio.run(send())


def test_the_table_is_complete():
    known = {
        error.code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.GpuscoreError)
    }
    assert known == COVERED


class TestJson:
    """Bodies that are not a JSON object in UTF-8."""

    BODIES = {
        "empty": b"",
        "white space": b" \n",
        "a list": b"[]",
        "a string": json.dumps(MARKER).encode(),
        "a number": b"1",
        "null": b"null",
        "cut short": json.dumps(TEXT).encode()[:-1],
        "trailing bytes": json.dumps(TEXT).encode() + b" x",
        "two objects": json.dumps(TEXT).encode() * 2,
        "a trailing comma": b'{"items":["a"],}',
        "single quotes": b"{'items':['a']}",
        "a comment": b'{"items":["a"]} // ' + MARKER.encode(),
        "100,000 levels of lists": b"[" * 100_000,
        "100,000 levels in a field": b'{"items":' + b"[" * 100_000,
        "100,000 levels in an unknown field": b'{"zzz":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "100,000 levels of objects": b'{"items":' * 100_000,
        "invalid UTF-8": b'{"items":["\xff"],"label_token_ids":[3]}',
        "invalid UTF-8 in a name": b'{"\xff":1}',
        "UTF-8 cut short": b'{"items":["\xe2\x98"],"label_token_ids":[3]}',
        "an overlong encoding": b'{"items":["\xc0\xaf"],"label_token_ids":[3]}',
        "a surrogate in UTF-8": b'{"items":["\xed\xa0\x80"],"label_token_ids":[3]}',
        "UTF-8 with a BOM": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        "UTF-16": json.dumps(GOOD).encode("utf-16"),
        "UTF-16 without a BOM": json.dumps(GOOD).encode("utf-16-le"),
        "UTF-32": json.dumps(GOOD).encode("utf-32"),
    }

    @pytest.mark.parametrize("body", table("invalid_request", BODIES))
    def test_body(self, client, body):
        check_error(post(client, body), 400, "invalid_request")

    @pytest.mark.parametrize("field", ["query", "items", "labels", "model", "cache_salt"])
    @pytest.mark.parametrize("escape", ["\\ud800", "\\udfff", "\\ude00\\ud83d", "\\ud83dx"])
    def test_a_lone_surrogate(self, client, field, escape):
        text = f'"{escape}"'
        body = {"query": '"q"', "items": '["a"]', "labels": '["y"]'}
        body[field] = f"[{text}]" if field in ("items", "labels") else text
        sent = "{" + ",".join(f'"{name}":{value}' for name, value in body.items()) + "}"
        assert post(client, sent.encode()).json()["error"]["code"] == "invalid_request"

    def test_a_pair_of_surrogates_is_a_character(self, client):
        sent = b'{"items":["\\ud83d\\ude00"],"label_token_ids":[3]}'
        answer = post(client, sent)
        assert answer.status_code == 200
        assert (
            answer.json()["scores"]
            == score(client, items=["😀"], label_token_ids=[3]).json()["scores"]
        )


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

    @pytest.mark.parametrize("value", table("invalid_request", INTEGERS))
    @pytest.mark.parametrize(
        "field",
        [
            '"query":[%s]',
            '"query":[-1,%s,5]',
            '"items":[[7],[-1,%s]]',
            '"label_token_ids":[3,%s,-1]',
            '"label_token_ids":[[3],[%s]]',
        ],
    )
    def test_integers_are_json_integers_within_int64(self, client, field, value):
        name = field.split('"')[1]
        others = json.dumps({key: given for key, given in GOOD.items() if key != name})
        sent = f"{others[:-1]},{field % value}}}"
        check_error(post(client, sent.encode()), 400, "invalid_request")

    # Each value: the body's field as JSON text, because json.dumps would not write all of them, and
    # the expected `param`.
    VALUES = {
        "query: number": ('"query":1', "query"),
        "query: object": ('"query":{}', "query"),
        "query: list of text": ('"query":["a"]', "query[0]"),
        "items: missing": ('"items":null', "items"),
        "items: number": ('"items":1', "items"),
        "items: object": ('"items":{}', "items"),
        "items: numbers": ('"items":[1]', "items[0]"),
        "items: null": ('"items":[[1],null]', "items[1]"),
        "items: object inside": ('"items":[{}]', "items[0]"),
        "label_token_ids: number": ('"label_token_ids":3', "label_token_ids"),
        "label_token_ids: text": ('"label_token_ids":"3"', "label_token_ids"),
        "label_token_ids: both kinds": ('"label_token_ids":[3,[4]]', "label_token_ids"),
        "label_token_ids: too few lists": ('"label_token_ids":[[3]]', "label_token_ids"),
        "label_token_ids: too many lists": ('"label_token_ids":[[3],[4],[5]]', "label_token_ids"),
        "labels: text": ('"label_token_ids":null,"labels":"y"', "labels"),
        "labels: ids": ('"label_token_ids":null,"labels":[3]', "labels[0]"),
        "labels beside ids": ('"labels":["y"]', "labels"),
        "apply_softmax: text": ('"apply_softmax":"true"', "apply_softmax"),
        "apply_softmax: number": ('"apply_softmax":1', "apply_softmax"),
        "item_first: number": ('"item_first":0', "item_first"),
        "temperature without softmax": ('"temperature":2.0', "temperature"),
        "temperature 0": ('"apply_softmax":true,"temperature":0', "temperature"),
        "temperature below 0": ('"apply_softmax":true,"temperature":-0.5', "temperature"),
        "temperature: text": ('"apply_softmax":true,"temperature":"1"', "temperature"),
        "temperature: true": ('"apply_softmax":true,"temperature":true', "temperature"),
        "temperature 1e400": ('"apply_softmax":true,"temperature":1e400', "temperature"),
        "temperature 10^400": (f'"apply_softmax":true,"temperature":{10**400}', "temperature"),
        "temperature NaN": ('"apply_softmax":true,"temperature":NaN', None),
        "model: number": ('"model":1', "model"),
        "return_label_logprobs: text": ('"return_label_logprobs":"yes"', "return_label_logprobs"),
        "return_label_mass: list": ('"return_label_mass":[]', "return_label_mass"),
        "salt: empty": ('"cache_salt":""', "cache_salt"),
        "salt: 65 characters": (f'"cache_salt":"{"x" * 65}"', "cache_salt"),
        "salt: a space": ('"cache_salt":"a b"', "cache_salt"),
        "salt: a line break": ('"cache_salt":"a\\n"', "cache_salt"),
        "salt: umlaut": (f'"cache_salt":"{MARKER}"', "cache_salt"),
        "salt: number": ('"cache_salt":5', "cache_salt"),
        "priority 101": ('"priority":101', "priority"),
        "priority -101": ('"priority":-101', "priority"),
        "priority 1.0": ('"priority":1.0', "priority"),
        "priority true": ('"priority":true', "priority"),
        "priority 10^400": (f'"priority":{10**400}', "priority"),
        "priority of 5000 digits": (f'"priority":{"9" * 5000}', "priority"),
        "unknown field": ('"top_k":5', "top_k"),
        "unknown field, nasty name": (f'"<{MARKER}>":5', None),
        "unknown field, empty name": ('"":5', None),
        "unknown field, name with a break": (f'"a\\n{MARKER}":5', None),
        "unknown field, quotes in its name": (f'"` - at `$.{MARKER}`":5', None),
        "unknown field, 65 characters": (f'"{"x" * 65}":5', None),
        "unknown field, 1 MB": (f'"{"x" * 10**6}":5', None),
        "return_token_logprobs": ('"return_token_logprobs":true', "return_token_logprobs"),
        "pooled": ('"return_pooled_hidden_states":true', "return_pooled_hidden_states"),
        "extraction": (f'"score_extraction_token":"{MARKER}"', "score_extraction_token"),
        "empty extraction": ('"score_extraction_token":""', "score_extraction_token"),
        "override id": ('"embed_override_token_id":0', "embed_override_token_id"),
        "query overrides": ('"query_embed_overrides":[[0.5]]', "query_embed_overrides"),
        "empty query overrides": ('"query_embed_overrides":[]', "query_embed_overrides"),
        "item overrides": ('"item_embed_overrides":[[[0.5]],null]', "item_embed_overrides"),
    }

    @pytest.mark.parametrize(("field", "param"), table("invalid_request", VALUES))
    def test_value(self, client, field, param):
        sent = f"{json.dumps(GOOD)[:-1]},{field}}}"  # the last of duplicate keys counts
        message = check_error(post(client, sent.encode()), 400, "invalid_request", param)
        if param is not None:
            assert param.split("[")[0] in message

    def test_both_label_fields_even_if_one_is_empty(self, client):
        check_error(score(client, **GOOD, labels=[]), 400, "invalid_request", "labels")

    def test_items_must_be_there(self, client):
        reply = score(client, query="a", label_token_ids=[3])
        check_error(reply, 400, "invalid_request", "items")

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
        "text query": {"query": MARKER, "items": [[5]]},
        "id query": {"query": [5], "items": [MARKER]},
        "items": {"items": [[5], MARKER]},
        "items, text first": {"query": MARKER, "items": [MARKER, [5]]},
        "an empty item": {"query": [5], "items": [[5], ""]},
        "a lone string": {"query": [5], "items": MARKER},
    }

    @pytest.mark.parametrize("body", table("mixed_input_types", MIXED))
    @pytest.mark.parametrize("item_first", [False, True])
    def test_text_and_ids_do_not_mix(self, client, body, item_first):
        reply = score(client, **body, label_token_ids=[3], item_first=item_first)
        check_error(reply, 400, "mixed_input_types", "items")


class TestTokens:
    OUT_OF_RANGE = {
        "label -1": ({"label_token_ids": [3, -1]}, "label_token_ids"),
        "label at the bound": ({"label_token_ids": [VOCAB]}, "label_token_ids"),
        "label of one item": ({"label_token_ids": [[3], [VOCAB]]}, "label_token_ids[1]"),
        "query -1": ({"query": [-1]}, "query"),
        "query at the bound": ({"query": [5, VOCAB]}, "query"),
        "item -1": ({"items": [[5], [6, -1]]}, "items[1]"),
        "item at the bound": ({"items": [[5], [VOCAB]]}, "items[1]"),
        "largest": ({"query": [2**63 - 1]}, "query"),
        "smallest": ({"label_token_ids": [-(2**63)]}, "label_token_ids"),
        "2^32 + 5": ({"label_token_ids": [2**32 + 5]}, "label_token_ids"),
    }

    @pytest.mark.parametrize(("fields", "param"), table("token_id_out_of_range", OUT_OF_RANGE))
    def test_token_id(self, client, fields, param):
        body = GOOD | fields
        message = check_error(score(client, **body), 400, "token_id_out_of_range", param)
        assert message.endswith(f"valid are 0 to {VOCAB - 1}")

    @covers("label_not_single_token")
    def test_a_label_of_several_tokens(self, client, encode):
        ids = encode(MARKER)[1:]  # without <s>
        assert len(ids) > 16
        reply = score(client, items=["a"], labels=["y", MARKER])
        message = check_error(reply, 400, "label_not_single_token", "labels[1]")
        assert f"{len(ids)} tokens" in message
        assert ", ".join(map(str, ids[:16])) in message
        reply = score(client, items=["a"], labels=["nyn"])
        message = check_error(reply, 400, "label_not_single_token", "labels[0]")
        assert f"[{', '.join(map(str, encode('nyn')[1:]))}]" in message

    def test_a_label_of_no_token(self, client):
        reply = score(client, items=["a"], labels=[""])
        check_error(reply, 400, "label_not_single_token", "labels[0]")

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


class TestOrder:
    """The first failing check answers: authorisation, content type, size, JSON, fields, model,
    tokens."""

    @covers("invalid_api_key")
    def test_authorisation_before_content_type(self, limited):
        reply = httpx.post(f"{limited.base_url}/v1/score", content=b"x", trust_env=False)
        check_error(reply, 401, "invalid_api_key", None)

    def test_content_type_before_size(self, limited):
        reply = post(limited, b" " * (2**20 + 1), content_type="text/plain")
        check_error(reply, 415, "unsupported_media_type", None)

    def test_size_before_json(self, limited):
        check_error(post(limited, b"{" * (2**20 + 1)), 413, "body_too_large", None)

    def test_json_before_fields(self, client):
        check_error(post(client, b'{"items":1'), 400, "invalid_request", "items")
        check_error(post(client, b'{"items":["a"],"labels":["y"]'), 400, "invalid_request", None)

    @pytest.mark.parametrize(
        "fields",
        [
            {"items": None},
            {"temperature": 2.0},
            {"labels": ["y"]},
            {"label_token_ids": [[3]]},
            {"label_token_ids": [3, [4]]},
        ],
    )
    def test_fields_before_model(self, client, fields):
        check_error(score(client, **(GOOD | fields), model="other"), 400, "invalid_request")

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"label_token_ids": None}, "missing_labels"),
            ({"label_token_ids": []}, "empty_labels"),
            ({"query": "a"}, "mixed_input_types"),
        ],
    )
    def test_fields_with_a_code_of_their_own_before_model(self, client, fields, code):
        check_error(score(client, **(GOOD | fields), model="other"), 400, code)

    def test_model_before_tokens(self, client):
        reply = score(client, items=[[VOCAB]], label_token_ids=[-1], model="other")
        check_error(reply, 404, "model_not_found", "model")


class TestBodies:
    @covers("body_too_large")
    def test_16_mib_are_read_and_one_byte_more_is_not(self, client):
        body = json.dumps(GOOD).encode()
        full = body + b" " * (16 * 2**20 - len(body))
        assert post(client, full).status_code == 200
        check_error(post(client, full + b" "), 413, "body_too_large", None)

    @pytest.mark.parametrize("size", [2**20 + 1, 3 * 2**20])
    @pytest.mark.parametrize("announced", [True, False])
    def test_over_the_limit(self, limited, size, announced):
        parts = (b" " * n for n in [2**16] * (size // 2**16) + [size % 2**16])
        content = b"".join(parts) if announced else parts
        reply = post(limited, content)
        message = check_error(reply, 413, "body_too_large", None)
        assert str(2**20) in message
        assert reply.headers["connection"] == "close"

    def test_at_the_limit_without_a_length(self, limited):
        body = json.dumps(GOOD | {"apply_softmax": True}).encode().ljust(2**20)
        assert post(limited, (body[i : i + 999] for i in range(0, 2**20, 999))).status_code == 200

    @pytest.mark.parametrize("length", ["9" * 21, "9" * 5000, "-1", "+5", "5, 6", "x", "1_0"])
    def test_a_length_that_is_none(self, limited, length):
        """int() gets no number before its digits are counted."""
        with Connection(limited) as connection:
            connection.request("POST", "/v1/score", f"Content-Length: {length}")
            reply = connection.reply()
            assert reply.status in (400, 413, 431)
            check_error(reply, reply.status, json.loads(reply.body)["error"]["code"], None)

    def test_a_body_that_is_never_sent_and_one_that_never_ends(self, limited):
        """The server reads on for a moment, both at once, so that the client does not see a
        reset."""
        with Connection(limited) as announced, Connection(limited) as endless:
            announced.request(length=10**15)
            json_chunked = ("Content-Type: application/json", CHUNKED)
            endless.send(endless.head("POST", "/v1/score", *json_chunked))
            for _ in range(17):
                endless.send(b"10000\r\n" + b" " * 2**16 + b"\r\n")
            for connection in (announced, endless):
                check_error(connection.reply(), 413, "body_too_large", None)
                assert connection.closed

    def test_one_byte_chunks(self, client):
        body = json.dumps(GOOD).encode().ljust(3000)
        reply = post(client, (body[i : i + 1] for i in range(len(body))))
        assert reply.status_code == 200

    @covers("unsupported_media_type")
    @pytest.mark.parametrize(
        "content_type",
        [
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/jsonx",
            "application/problem+json",
            "text/json",
            "application/json; charset=utf-16",
            "application/json; charset=latin-1",
            f"application/{MARKER.encode('ascii', 'ignore').decode()}",
        ],
    )
    def test_content_type(self, client, content_type):
        reply = post(client, json.dumps(GOOD).encode(), content_type=content_type)
        check_error(reply, 415, "unsupported_media_type", None)

    def test_no_content_type(self, client):
        with Connection(client) as connection:
            connection.send(connection.head("POST", "/v1/score", "Content-Length: 2") + b"{}")
            check_error(connection.reply(), 415, "unsupported_media_type", None)

    @pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "gzip, identity", "x"])
    def test_content_encoding(self, client, encoding):
        bomb = gzip.compress(b" " * 2**24)
        reply = post(client, bomb, content_encoding=encoding)
        check_error(reply, 415, "unsupported_media_type", None)

    def test_identity_is_no_encoding(self, client):
        body = json.dumps(GOOD).encode()
        assert post(client, body, content_encoding="identity").status_code == 200

    @pytest.mark.parametrize("path", ["/v1/score", "/nowhere", "/health"])
    def test_a_refusal_is_heard_although_the_body_is_large(self, client, path):
        """4 MiB exceed any socket buffer and the server does not read them, yet the answer
        arrives."""
        reply = client.post(path, content=b"x" * 2**22, headers={"content-type": "text/plain"})
        codes = {415: "unsupported_media_type", 404: "not_found", 405: "method_not_allowed"}
        check_error(reply, reply.status_code, codes[reply.status_code], None)


class TestPaths:
    @covers("not_found")
    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/v1",
            "/v1/",
            "/v1/score/",
            "//v1/score",
            "/v1//score",
            "/V1/SCORE",
            "/v1/Score",
            "/v1/scores",
            "/v1/score/..",
            "/v1/../v1/score",
            "/score",
            "/health/",
            "/redoc",
            "/metrics/",
            "/v1/score%2f",
            "/v1/score;a",
            "/%ff%fe",
            "http://a/v1/scores",
            f"/{MARKER.encode('ascii', 'ignore').decode()}",
        ],
    )
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_unknown_path(self, client, path, method):
        with Connection(client) as connection:
            connection.request(method, path, body=json.dumps(GOOD).encode())
            check_error(connection.reply(), 404, "not_found", None)

    def test_a_query_string_is_ignored(self, client):
        with Connection(client) as connection:
            connection.request(path="/v1/score?a=b", body=json.dumps(GOOD).encode())
            assert connection.reply().status == 200

    @covers("method_not_allowed")
    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            *((m, "/v1/score", "POST") for m in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")),
            *((m, "/v1/score", "POST") for m in ("TRACE", "BREW", "post")),
            *((m, "/health", "GET, HEAD") for m in ("POST", "DELETE")),
            *((m, "/v1/models", "GET, HEAD") for m in ("POST", "DELETE")),
        ],
    )
    def test_wrong_method(self, client, method, path, allowed):
        with Connection(client) as connection:
            connection.request(method, path)
            reply = connection.reply()
            check_error(reply, 405, "method_not_allowed", None)
            assert reply.headers["allow"] == allowed

    def test_head_has_no_body_and_the_connection_goes_on(self, client):
        with Connection(client) as connection:
            for path in ("/v1/score", "/nowhere", "/health"):
                connection.request("HEAD", path)
                assert connection.reply(has_body=False).status in (200, 404, 405)
            connection.request("GET", "/health")
            assert connection.reply().status == 200


class TestProtocol:
    def test_pipelined_requests_are_answered_in_order(self, client):
        bodies = [json.dumps({"items": [[i]], "label_token_ids": [3]}).encode() for i in (5, 6, 7)]
        want = [post(client, body).json()["scores"] for body in bodies]
        assert want[0] != want[1] != want[2]
        with Connection(client) as connection:
            heads = [connection.head(body=body) for body in bodies]
            connection.send(b"".join(h + b for h, b in zip(heads, bodies, strict=True)))
            replies = [connection.reply() for _ in bodies]
        assert [json.loads(reply.body)["scores"] for reply in replies] == want

    def test_the_connection_lives_on_after_an_error(self, limited):
        poisoned = {"items": [[5]], "label_token_ids": [POISON], "apply_softmax": True}
        with Connection(limited) as connection:
            for body, status in ((b"{", 400), (json.dumps(poisoned).encode(), 500)):
                connection.request(body=body)
                assert connection.reply().status == status
            connection.request("GET", "/nowhere")
            assert connection.reply().status == 404
            connection.request("GET", "/health")
            assert connection.reply().status == 200

    MALFORMED = {
        "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        "no host": b"GET /health HTTP/1.1\r\n\r\n",
        "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "no version": b"GET /health\r\n\r\n",
        "a space in a name": b"GET /health HTTP/1.1\r\nHost: a\r\nX y: z\r\n\r\n",
        "a space before the colon": b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n",
        "NUL in a value": b"GET /health HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
        "two lengths": b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n"
        b"Content-Length: 3\r\n\r\n{}",
        "another transfer encoding": b"POST /v1/score HTTP/1.1\r\nHost: a\r\n"
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    }

    @pytest.mark.parametrize("sent", table("invalid_request", MALFORMED))
    def test_malformed_head(self, client, sent):
        with Connection(client) as connection:
            connection.send(sent)
            check_error(connection.reply(), 400, "invalid_request", None)
            assert connection.closed

    def test_both_length_and_transfer_encoding_smuggle_nothing(self, client):
        body = json.dumps(GOOD).encode()
        with Connection(client) as connection:
            connection.send(
                connection.head("POST", "/v1/score", CHUNKED, body=body)
                + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
                + connection.head("GET", "/v1/models")
            )
            check_error(connection.reply(), 400, "invalid_request", None)
            assert connection.closed

    @pytest.mark.parametrize("chunk", [b"zz\r\n", b"-1\r\n", b"5\r\n{}", b"fffffffffffffffff\r\n"])
    def test_a_broken_chunk(self, limited, chunk):
        with Connection(limited) as connection:
            head = connection.head("POST", "/v1/score", "Content-Type: application/json", CHUNKED)
            connection.send(head + chunk + b"rubbish\r\n\r\n")
            reply = connection.reply()
            assert reply.status in (400, 408)
            codes = {400: "invalid_request", 408: "request_timeout"}
            check_error(reply, reply.status, codes[reply.status], None)

    @covers("header_too_large")
    @pytest.mark.parametrize(
        "fields",
        [["X-A: 1"] * 101, ["X-A: " + "y" * 17_000], [f"X-{i}: {'y' * 300}" for i in range(60)]],
        ids=["101 fields", "one long field", "many fields"],
    )
    def test_a_large_head(self, client, fields):
        with Connection(client) as connection:
            connection.request("GET", "/health", *fields)
            check_error(connection.reply(), 431, "header_too_large", None)
            assert connection.closed

    def test_a_long_path(self, client):
        with Connection(client) as connection:
            connection.request("GET", "/health?" + "x" * 17_000)
            check_error(connection.reply(), 431, "header_too_large", None)

    def test_heads_at_the_limit(self, client):
        for fields in (["X-A: 1"] * 99, ["X-A: " + "y" * 16_000]):
            with Connection(client) as connection:
                connection.request("GET", "/health", *fields)
                assert connection.reply().status == 200

    @pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nX: ", b"GET /"])
    def test_an_endless_head(self, limited, start):
        with Connection(limited) as connection:
            connection.send(start + b"y" * 4096)
            check_error(connection.reply(), 431, "header_too_large", None)
            assert connection.closed


def peers(server):
    """Return the ports to which the server's process has open connections, from /proc."""
    sockets = set()
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[9] in sockets}


class TestTimes:
    """The limited server allows 0.4 seconds for a head and 1 for a body."""

    @covers("request_timeout")
    def test_heads_that_do_not_end(self, limited):
        start = time.monotonic()
        with (
            Connection(limited) as empty,
            Connection(limited) as line,
            Connection(limited) as field,
        ):
            line.send(b"POST /v1/sc")
            field.send(b"POST /v1/score HTTP/1.1\r\nHost: a\r\nX-A: ")
            for connection in (empty, line, field):
                self.is_too_late(connection)
        assert 0.3 < time.monotonic() - start < 5

    @staticmethod
    def is_too_late(connection):
        check_error(connection.reply(), 408, "request_timeout", None)
        assert connection.closed

    def test_a_head_that_trickles(self, limited):
        """The deadline is for the whole head; further bytes do not extend it."""
        with Connection(limited) as connection:
            connection.send(b"GET /health HTTP/1.1\r\nX-A: ")
            while connection.silent:
                connection.send(b"y")
                time.sleep(0.05)
            check_error(connection.reply(), 408, "request_timeout", None)

    def test_a_second_head_that_does_not_end(self, limited):
        with Connection(limited) as connection:
            connection.request("GET", "/health")
            assert connection.reply().status == 200
            connection.send(b"GET /hea")
            check_error(connection.reply(), 408, "request_timeout", None)

    def test_bodies_that_do_not_end(self, limited):
        with Connection(limited) as empty, Connection(limited) as begun:
            empty.request(length=100)
            begun.request(body=b'{"items":[', length=100)
            for connection in (empty, begun):
                self.is_too_late(connection)

    def test_a_body_that_trickles(self, limited):
        with Connection(limited) as connection:
            connection.request(length=1000)
            while connection.silent:
                connection.send(b" ")
                time.sleep(0.05)
            check_error(connection.reply(), 408, "request_timeout", None)

    @pytest.mark.parametrize("keep_alive", [True, False])
    def test_an_answer_that_nobody_takes(self, limited_server, limited, keep_alive):
        """The request counts as in flight until the server gives up its connection and the unsent
        answer."""
        body = {"items": [[5 + i % 9] for i in range(10_000)], "apply_softmax": True}
        raw = json.dumps(body | {"label_token_ids": list(range(8, 128))}).encode()
        fields = () if keep_alive else ("Connection: close",)
        with Connection(limited) as connection:
            connection.request("POST", "/v1/score", *fields, body=raw)
            wait_until(lambda: not connection.silent, seconds=60)
            check_error(score(limited, **URGENT), 429, "overloaded")
            ours = connection.socket.getsockname()[1]
            wait_until(lambda: ours not in peers(limited_server), seconds=30)
            received = b""
            with suppress(ConnectionError):
                while part := connection.socket.recv(2**20):
                    received += part
        head, _, rest = received.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", head)
        assert len(rest) < int(length), "the client's memory took all of it"
        assert score(limited, **URGENT).status_code == 200

    @covers("deadline_exceeded")
    def test_an_answer_that_takes_too_long(self, client):
        before = canary(client)
        start = time.monotonic()
        reply = post(client, large_request(1_000_000), x_request_timeout_ms="400")
        check_error(reply, 504, "deadline_exceeded", None)
        assert canary(client) == before, "what is left of the request was dropped"
        assert time.monotonic() - start < 5


class TestOverload:
    """The limited server takes one request per key and two in all, and refuses further ones at
    once."""

    @pytest.fixture
    def idle_again(self, limited, unharmed):  # `unharmed` asks the canary after this fixture
        yield
        # The clients have left, so their requests are dropped and no longer count.
        wait_until(lambda: score(limited, **URGENT).status_code == 200)

    @covers("overloaded")
    @pytest.mark.usefixtures("idle_again")
    @pytest.mark.parametrize(
        ("keys", "reason"), [((0, 0), "API key"), ((0, 1, 2), "2 requests with")]
    )
    def test_one_request_too_many(self, limited_server, keys, reason):
        body = large_request(250_000, apply_softmax=True)
        assert len(body) < 2**20
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(limited_server, KEYS[i])) for i in keys]
            sent = [stack.enter_context(Connection(client)) for client in clients]
            for connection in sent:
                connection.request(body=body)
            wait_until(lambda: not all(connection.silent for connection in sent))
            (refused,) = [connection for connection in sent if not connection.silent]
            reply = refused.reply()
            assert reason in check_error(reply, 429, "overloaded", None)
            assert 1 <= retry_after(reply) <= 30
            if reason == "API key":
                bob = stack.enter_context(connected(limited_server, KEYS[1]))
                assert score(bob, **URGENT).status_code == 200, "another key is not concerned"
            # The server closes the refused connection after it has read the whole body.
            others = [connection for connection in sent if connection is not refused]
            assert all(connection.silent for connection in others), "the others are worked on"


class TestMemoryAndBugs:
    @covers("nonfinite_score")
    def test_a_score_that_is_not_finite(self, limited):
        body = {"items": [[5], [6], [8]], "apply_softmax": True}
        labels = [[3, 17], [3, POISON], [3]]
        reply = score(limited, **body, label_token_ids=labels)
        check_error(reply, 500, "nonfinite_score", "items[1]")
        assert score(limited, **body, label_token_ids=[3, 17]).status_code == 200
        reply = score(limited, items=["a"], labels=["y"])  # all labels, POISON among them
        check_error(reply, 500, "nonfinite_score", "items[0]")

    @covers("insufficient_memory")
    def test_a_request_over_all_memory(self, model):
        """`serve` refuses to start with so little memory, so the test builds the service itself."""
        plan = plan_backend(model[0], ModelConfig(str(model[0])))
        small = replace(plan, pages=replace(plan.pages, needed=2, most=2))
        with service_of(small, model[0]) as service:
            fits = {"query": [5] * 32, "items": [[6], [7]], "label_token_ids": [3]}
            before = ask_app(service, fits).json()["scores"]
            reply = ask_app(service, fits | {"query": [5] * 33})
            check_error(reply, 503, "insufficient_memory")
            after = ask_app(service, fits).json()["scores"]  # its query is cached by now
            assert after == pytest.approx(np.array(before), abs=1e-6)

    @covers("internal_error")
    def test_a_bug(self, caplog):
        class BrokenService(ScoringService):
            def model_name(self, wanted):
                raise KeyError(MARKER)

        service = BrokenService(("tiny",), 1)
        message = check_error(ask_app(service, GOOD), 500, "internal_error", None)
        assert message == "internal error"
        assert "unhandled error" in caplog.text

    @covers("unavailable")
    def test_before_the_model_is_there(self):
        service = ScoringService(("tiny",))
        for path in ("/ready", "/v1/score"):
            reply = ask_app(service, GOOD, path)
            check_error(reply, 503, "unavailable", None)
            assert retry_after(reply) >= 1
        assert ask_app(service, GOOD, "/health").status_code == 200, "alive, only not ready"

    def test_an_engine_that_has_stopped(self, model):
        with service_of(plan_backend(model[0], ModelConfig(str(model[0]))), model[0]) as service:
            assert ask_app(service, GOOD, "/health").status_code == 200
            assert ask_app(service, GOOD, "/ready").status_code == 200
            service.model.engine.close()
            for path in ("/health", "/ready", "/v1/score"):
                reply = ask_app(service, GOOD, path)
                check_error(reply, 503, "unavailable", None)
                assert retry_after(reply) >= 1
