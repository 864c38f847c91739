"""Promise: a server on loopback that trusts everybody there answers to loopback names only, so that
no web page reads it under a name of its own (DNS rebinding)."""

import pytest

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.server.http.headers import check_host, read_hosts
from support.connections import Connection, check_error, connected
from support.serving import QUICK, serving

LOOPBACK = [
    *("localhost", "LocalHost:8000", "localhost.", "localhost.:1", "a.localhost", ""),
    *("127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]"),
]
OTHERS = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost", "10.0.0.1"),
    *("127.0.0.1.evil.example", "0.0.0.0", "[::]", "[::2]:8000", "127.1", "localh%6fst"),
]


def answers(hosts, name):
    try:
        check_host([(b"accept", b"*/*"), (b"host", name.encode())], hosts)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_without_keys_on_loopback(host):
    hosts = read_hosts(ServerConfig(), host, keys=0)
    assert [name for name in LOOPBACK if not answers(hosts, name)] == []
    assert [name for name in OTHERS if answers(hosts, name)] == []
    check_host([], hosts)  # HTTP/1.0


@pytest.mark.parametrize(("host", "keys"), [("127.0.0.1", 1), ("0.0.0.0", 0), ("10.0.0.1", 2)])
def test_other_servers_answer_to_any_name(host, keys):
    hosts = read_hosts(ServerConfig(), host, keys)
    assert all(answers(hosts, name) for name in LOOPBACK + OTHERS)


@pytest.mark.parametrize(("host", "keys"), [("127.0.0.1", 0), ("127.0.0.1", 1), ("10.0.0.1", 1)])
def test_names_that_are_given(host, keys):
    config = ServerConfig(allowed_hosts="Scores.example, [fd00::1]")
    hosts = read_hosts(config, host, keys)
    more = ["scores.example", "SCORES.EXAMPLE:80", "scores.example.", "[fd00::1]:80", host]
    assert all(answers(hosts, name) for name in LOOPBACK + more)
    assert [name for name in OTHERS if answers(hosts, name)] == [host] * (host in OTHERS)
    anything = read_hosts(ServerConfig(allowed_hosts="*"), host, keys)
    assert all(answers(anything, name) for name in OTHERS)


@pytest.mark.parametrize("names", ["", "a,", "http://a", "a:80", "a b", "*,a", "*.a"])
def test_names_that_no_host_field_could_have(names):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        read_hosts(ServerConfig(allowed_hosts=names), "127.0.0.1", keys=0)


def reply(client, path, name, body=None):
    with Connection(client) as connection:
        connection.request("GET" if body is None else "POST", path, f"Host: {name}", body=body)
        return connection.reply()


def test_real_servers():
    scored = b'{"query": [5], "items": [[7]], "label_token_ids": [3]}'
    with serving("demo", *QUICK) as server, connected(server) as client:
        for path in ("/", "/health", "/metrics", "/nowhere"):
            answer = reply(client, path, "evil.example:80")
            message = check_error(answer, 400, "invalid_request", "Host")
            assert "--allowed-hosts" in message
            assert "evil" not in message
        check_error(reply(client, "/v1/score", "evil.example", scored), 400, "invalid_request")
        assert reply(client, "/health", "localhost").status == 200
    with (
        serving("demo", *QUICK, "--allowed-hosts", "scores.example") as server,
        connected(server) as client,
    ):
        assert reply(client, "/health", "scores.example").status == 200
        check_error(reply(client, "/health", "evil.example"), 400, "invalid_request", "Host")
