"""Promise: a wrong path, header or size is refused, and the first error in the contract's order
answers.

Afterwards both servers still answer the canary request as they did at the start.
"""

import json

import httpx
import pytest

from support.connections import MARKER, POISON, Connection, check_error, post, score
from support.error_table import GOOD, covers
from support.models import VOCAB

pytestmark = pytest.mark.usefixtures("unharmed")


class TestPaths:
    @covers("not_found")
    @pytest.mark.parametrize(
        "path",
        [
            *("/ui/", "/ui/../ui/page.css", "//", "/v1", "/v1/score/", "//v1/score", "/V1/SCORE"),
            *("/v1/score/..", "/v1/../v1/score", "/health/", "/v1/score%2f", "/v1/score;a"),
            *("/%ff%fe", "/health%00", f"/{MARKER.encode('ascii', 'ignore').decode()}"),
        ],
    )
    def test_unknown_path(self, client, path):
        with Connection(client) as connection:
            for method in ("GET", "POST"):
                connection.request(method, path, body=json.dumps(GOOD).encode())
                check_error(connection.reply(), 404, "not_found", None)

    def test_a_path_of_another_server_gets_ours(self, client):
        for path, ours in (("/generative_scoring", "/v1/score"), ("/predict", "/v1/classify")):
            message = check_error(client.post(path, json={}), 404, "not_found", None)
            assert message == f"no such path; send such requests to {ours}"

    @covers("method_not_allowed")
    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            *((m, "/v1/score", "POST") for m in ("GET", "PUT", "OPTIONS", "TRACE", "PURGE")),
            *(("POST", path, "GET, HEAD") for path in ("/health", "/", "/v1/models")),
        ],
    )
    def test_wrong_method(self, client, method, path, allowed):
        with Connection(client) as connection:
            connection.request(method, path)
            reply = connection.reply()
            check_error(reply, 405, "method_not_allowed", None)
            assert reply.headers["allow"] == allowed


class TestProtocol:
    def test_the_connection_lives_on_after_an_error(self, limited):
        poisoned = {"items": [[5]], "label_token_ids": [POISON], "apply_softmax": True}
        with Connection(limited) as connection:
            for body, status in ((b"{", 400), (json.dumps(poisoned).encode(), 500)):
                connection.request(body=body)
                assert connection.reply().status == status
            connection.request("GET", "/health")
            assert connection.reply().status == 200

    def test_a_malformed_head(self, client):
        with Connection(client) as connection:
            connection.send(b"GET /health HTTP/1.1\r\n\r\n")
            check_error(connection.reply(), 400, "invalid_request", None)
            assert connection.closed

    @covers("header_too_large")
    def test_a_large_head(self, client):
        with Connection(client) as connection:
            connection.request("GET", "/health", "X-A: " + "y" * 17_000)
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
