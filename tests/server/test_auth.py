"""Promise: without a key only probes and static pages are served, and no server is open by
accident."""

import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.paths import OPEN_PATHS
from gpuscore.dialects.served import ServedModel
from gpuscore.errors import ConfigError
from gpuscore.server.api.app import create_app
from gpuscore.server.http.auth import ApiKeys, read_api_keys
from gpuscore.server.service import ScoringService
from support.connections import KEYS, Connection, canary, check_error, connected
from support.programs import run

BODY = {"items": [[5]], "label_token_ids": [3]}


def routes():
    """(method, path) of every route of the application."""
    app = create_app(ScoringService([ServedModel("m")]), ServerConfig(), ApiKeys([b"k"]))
    return sorted((m, path) for path, route in app.routes.items() for m in route.methods)


def test_the_routes_are_these():
    posts = [path for method, path in routes() if method == "POST"]
    reranks = ["/infinity/rerank", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking"]
    refused = ["/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"]
    tokens = ["/tokenize", "/detokenize", "/v1/completions"]
    others = ["/classify", "/score", "/v1/classify", "/v1/score", "/v2/rerank"]
    assert posts == sorted([*reranks, *refused, *tokens, *others])
    gets = {path for method, path in routes() if method == "GET"}
    open_gets = {"/livez", "/health", "/ready", "/docs", "/openapi.json", "/", "/status"}
    files = {path for path in gets if path.startswith(("/ui/", "/docs/"))}
    assert gets - files == open_gets | {"/v1/models", "/metrics", "/info", "/tokenizer_info"}


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_route_is_closed_unless_it_is_meant_to_be_open(stranger, method, path):
    reply = stranger.request(method, path, json=BODY if method == "POST" else None)
    if path in OPEN_PATHS or path.startswith(("/ui/", "/docs/")):
        assert reply.status_code == 200
    elif method == "HEAD":
        assert reply.status_code == 401
    else:
        check_error(reply, 401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/score/", "//v1/score", "/health/", "/health/../v1/score", "/metrics"]
)
def test_what_matches_no_route_is_closed_too(limited, stranger, path):
    with Connection(stranger) as connection:
        connection.request("POST", path, body=b"{}")
        check_error(connection.reply(), 401, "invalid_api_key")


@pytest.mark.parametrize("host", ["a/health?x=", "x/health#", "127.0.0.1/health", "h:1@/docs?"])
def test_a_host_header_opens_nothing(stranger, host):
    """A server that rebuilt the path from the Host header would see /health here."""
    with Connection(stranger) as connection:
        connection.request("POST", "/v1/score", f"Host: {host}", body=b"{}")
        assert connection.reply().status in (400, 401)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(limited_server, key):
    with connected(limited_server, key) as client:
        assert canary(client)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["Authorization:"],
        ["Authorization: Bearer"],
        ["Authorization: Bearer "],
        ["Authorization: Bearer wrong"],
        [f"Authorization: Bearer {KEYS[0]}x"],
        [f"Authorization: Bearer {KEYS[0][:-1]}"],
        [f"Authorization: Bearer {KEYS[0]} {KEYS[0]}"],
        [f"Authorization: Basic {KEYS[0]}"],
        ["Authorization: wrong"],
        ["X-Api-Key:"],
        ["X-Api-Key: wrong"],
        [f"X-Api-Key: Bearer {KEYS[0]}"],
        [f"X-Api-Key: {KEYS[0]}", f"X-Api-Key: {KEYS[0]}"],
        [f"X-Api-Key: {KEYS[0]}", f"Authorization: Bearer {KEYS[1]}"],
        [f"X-Api-Key: {KEYS[0]}", "Authorization: Bearer wrong"],
        ["Authorization: Bearer ключ"],
        ["Authorization: Bearer wrong", f"Authorization: Bearer {KEYS[0]}"],
        [f"Authorization: Bearer {KEYS[0]}", f"Authorization: Bearer {KEYS[0]}"],
    ],
)
def test_any_other_header_is_refused(stranger, fields):
    with Connection(stranger) as connection:
        connection.request("POST", "/v1/score", *fields, body=b"{}")
        check_error(connection.reply(), 401, "invalid_api_key")


@pytest.mark.parametrize(
    "fields",
    [
        [f"Authorization: {KEYS[0]}"],
        [f"X-Api-Key: {KEYS[0]}"],
        [f"X-Api-Key: {KEYS[0]}", f"Authorization: Bearer {KEYS[0]}"],
    ],
)
def test_a_key_as_other_servers_take_it(limited_server, stranger, fields):
    with Connection(stranger) as connection:
        connection.request("GET", "/v1/models", *fields)
        assert connection.reply().status == 200


def test_the_scheme_is_case_insensitive(limited_server, stranger):
    with Connection(stranger) as connection:
        connection.request("GET", "/v1/models", f"authorization: bearer {KEYS[0]}")
        assert connection.reply().status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_open_address_needs_a_key(host, monkeypatch, tmp_path):
    config = ServerConfig(host=host)
    with pytest.raises(ConfigError, match="no API key is set"):
        read_api_keys(config)
    assert not read_api_keys(ServerConfig(host=host, insecure=True))
    monkeypatch.setenv("GPUSCORE_API_KEY", "k")
    assert read_api_keys(config)
    monkeypatch.delenv("GPUSCORE_API_KEY")
    (tmp_path / "keys").write_text("k\n")
    assert read_api_keys(ServerConfig(host=host, api_key_file=str(tmp_path / "keys")))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_needs_no_key(host):
    assert not read_api_keys(ServerConfig(host=host))


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes("\ufefffirst\r\nsecond\r\n".encode())
    keys = read_api_keys(ServerConfig(api_key_file=str(path)))
    for key in (b"first", b"second"):
        assert keys.tenant([(b"x-api-key", key)]) is not None


def test_a_comment_is_no_key(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of alice\nfirst\n  # second\n#third\nfo#urth\n")
    keys = read_api_keys(ServerConfig(api_key_file=str(path)))
    assert len(keys) == 2
    for key in (b"# of alice", b"of alice", b"# second", b"second", b"#third", b"third"):
        assert keys.tenant([(b"x-api-key", key)]) is None
    for key in (b"first", b"fo#urth"):
        assert keys.tenant([(b"x-api-key", key)]) is not None


def test_key_files_that_hold_no_key(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_api_keys(ServerConfig(api_key_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("\n  \n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys(ServerConfig(api_key_file=str(tmp_path / "empty")))
    (tmp_path / "comments").write_text("# a\n#b")
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys(ServerConfig(api_key_file=str(tmp_path / "comments")))


def test_the_program_refuses_an_open_address(model):
    done = run("serve", model[0], "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 78
    assert done.stderr.startswith("gpuscore: --host 0.0.0.0 is reachable from other machines")
    assert done.stderr.count("\n") == 1
