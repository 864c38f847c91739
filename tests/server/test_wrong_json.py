"""Promise: a body that is not the JSON that a route takes is refused as the contract says.

Afterwards both servers still answer the canary request as they did at the start.
"""

import json

import pytest

from support.connections import MARKER, Connection, check_error, post, score
from support.error_table import CHUNKED, GOOD, covers, table

pytestmark = pytest.mark.usefixtures("unharmed")

TEXT = {"query": MARKER, "items": [f"{MARKER} a", "b"], "label_token_ids": [3, 17]}


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
