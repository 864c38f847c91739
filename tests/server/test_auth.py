"""Promise: without a key only probes and static pages are served, and no server is open by
accident."""

import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.paths import OPEN_PATHS
from gpuscore.dialects.served import ServedModel
from gpuscore.errors import ConfigError
from gpuscore.server.api.app import create_app
from gpuscore.server.http.headers import ApiKeys, read_api_keys
from gpuscore.server.service import ScoringService
from support.connections import KEYS, Connection, check_error
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
    others = [
        "/pipeline/text-ranking",
        "/classify",
        "/score",
        "/v1/classify",
        "/v1/score",
        "/v2/rerank",
    ]
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
    ("path", "host"),
    [
        *((path, "a") for path in ("/nope", "/v1/score/", "//v1/score", "/health/../v1/score")),
        # A server that rebuilt the path from the Host header would see /health here.
        *(("/v1/score", host) for host in ("127.0.0.1/health", "a/health?x=", "h:1@/docs?")),
    ],
)
def test_what_matches_no_open_route_is_closed(stranger, path, host):
    with Connection(stranger) as connection:
        connection.request("POST", path, f"Host: {host}", body=b"{}")
        assert connection.reply().status in ((401,) if host == "a" else (400, 401))


ALICE, BOB, CAROL = KEYS


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        *((200, [field]) for field in (f"Authorization: {ALICE}", f"X-Api-Key: {ALICE}")),
        (200, [f"authorization: bearer {ALICE}"]),
        (200, [f"X-Api-Key: {ALICE}", f"Authorization: Bearer {ALICE}"]),
        *((200, [f"X-Api-Key: {key}"]) for key in (BOB, CAROL)),
        (401, []),
        *((401, [f"Authorization:{value}"]) for value in ("", " Bearer", " Bearer ", " wrong")),
        *((401, [f"Authorization: Bearer {key}"]) for key in ("ключ", f"{ALICE}x", ALICE[:-1])),
        *((401, [f"Authorization: {value}"]) for value in (f"Basic {ALICE}", f"{ALICE} {ALICE}")),
        *((401, [f"X-Api-Key: {key}"]) for key in ("", "wrong", f"Bearer {ALICE}")),
        (401, [f"X-Api-Key: {ALICE}"] * 2),
        (401, [f"Authorization: Bearer {ALICE}"] * 2),
        (401, [f"X-Api-Key: {ALICE}", f"Authorization: Bearer {BOB}"]),
        (401, ["Authorization: Bearer wrong", f"Authorization: Bearer {ALICE}"]),
    ],
)
def test_keys_as_other_servers_take_them(stranger, status, fields):
    with Connection(stranger) as connection:
        connection.request("GET", "/v1/models", *fields)
        reply = connection.reply()
        assert reply.status == status
        if status == 401:
            check_error(reply, 401, "invalid_api_key")


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


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ("\ufefffirst\r\nsecond\r\n", [b"first", b"second"]),  # a byte order mark is no part of it
        ("# of alice\nfirst\n  # second\n#third\nfo#urth\n", [b"first", b"fo#urth"]),
        ("\n  \n", []),
        ("# a\n#b", []),
    ],
)
def test_key_files(tmp_path, content, keys):
    path = tmp_path / "keys"
    path.write_bytes(content.encode())
    config = ServerConfig(api_key_file=str(path))
    if not keys:
        with pytest.raises(ConfigError, match="holds no key"):
            read_api_keys(config)
        with pytest.raises(ConfigError, match="No such file"):
            read_api_keys(ServerConfig(api_key_file=str(tmp_path / "none")))
        return
    read = read_api_keys(config)
    assert len(read) == len(keys)
    assert all(read.tenant([(b"x-api-key", key)]) for key in keys)


def test_the_program_refuses_an_open_address(model):
    done = run("serve", model[0], "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 78
    assert done.stderr.startswith("gpuscore: --host 0.0.0.0 is reachable from other machines")
    assert done.stderr.count("\n") == 1
