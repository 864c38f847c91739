"""Promise: a wrong path, header or size is refused, and the first error in the contract's order
answers.

After every test both servers still answer the canary request as they did at the start.
"""

import json

import httpx
import pytest

from support.connections import MARKER, POISON, Connection, check_error, post, score
from support.error_table import GOOD, covers, table
from support.models import VOCAB

pytestmark = pytest.mark.usefixtures("unharmed")


class TestPaths:
    @covers("not_found")
    @pytest.mark.parametrize(
        "path",
        [
            "/ui",
            "/ui/",
            "/ui/../ui/page.css",
            "/status/",
            "//",
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
            "/v2/score",
            "/health/",
            "/redoc",
            "/metrics/",
            "/v1/score%2f",
            "/v1/score;a",
            "/%ff%fe",
            "/v1/%73cores",
            f"/{MARKER.encode('ascii', 'ignore').decode()}",
        ],
    )
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_unknown_path(self, client, path, method):
        with Connection(client) as connection:
            connection.request(method, path, body=json.dumps(GOOD).encode())
            check_error(connection.reply(), 404, "not_found", None)

    @pytest.mark.parametrize(
        ("path", "ours"),
        [
            ("/generative_scoring", "/v1/score"),
            ("/predict", "/v1/classify"),
        ],
    )
    def test_a_path_of_another_server_gets_ours(self, client, path, ours):
        message = check_error(client.post(path, json={}), 404, "not_found", None)
        assert message == f"no such path; send such requests to {ours}"

    def test_a_query_string_is_ignored(self, client):
        with Connection(client) as connection:
            connection.request(path="/v1/score?a=b", body=json.dumps(GOOD).encode())
            assert connection.reply().status == 200

    @covers("method_not_allowed")
    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            *((m, "/v1/score", "POST") for m in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")),
            *((m, "/v1/score", "POST") for m in ("TRACE", "PURGE")),
            *((m, "/health", "GET, HEAD") for m in ("POST", "DELETE")),
            *((m, "/", "GET, HEAD") for m in ("POST", "DELETE")),
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
