"""Promise: a server on loopback that trusts everybody there answers to loopback names only, so that
no web page reads it under a name of its own (DNS rebinding)."""

import pytest

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.server.http.headers import check_host, read_hosts
from support.connections import check_error

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


def answered(host, keys, **settings):
    """Return the names that a server answers to, of those above."""
    hosts = read_hosts(ServerConfig(host=host, **settings), keys)
    return [name for name in LOOPBACK + OTHERS if answers(hosts, name)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "10.0.0.1"])
def test_without_names_that_are_given(host):
    """Keys protect a server, and one that others can reach has names of its own."""
    everywhere = host in ("0.0.0.0", "10.0.0.1")
    assert answered(host, 0) == (LOOPBACK + OTHERS if everywhere else LOOPBACK)
    assert answered(host, 1) == LOOPBACK + OTHERS
    check_host([], read_hosts(ServerConfig(host=host), 0))  # HTTP/1.0


@pytest.mark.parametrize(("host", "keys"), [("127.0.0.1", 0), ("127.0.0.1", 1), ("10.0.0.1", 1)])
def test_names_that_are_given(host, keys):
    names = "Scores.example, [fd00::1]"
    hosts = read_hosts(ServerConfig(host=host, allowed_hosts=names), keys)
    more = ["scores.example", "SCORES.EXAMPLE:80", "scores.example.", "[fd00::1]:80", host]
    assert all(answers(hosts, name) for name in more)
    known = LOOPBACK + [host] * (host in OTHERS)
    assert answered(host, keys, allowed_hosts=names) == known
    assert answered(host, keys, allowed_hosts="*") == LOOPBACK + OTHERS


@pytest.mark.parametrize("names", ["", "a,", "http://a", "a:80", "a b", "*,a", "*.a"])
def test_names_that_no_host_field_could_have(names):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        read_hosts(ServerConfig(allowed_hosts=names), keys=0)


def test_a_real_server(demo):
    for path in ("/", "/health", "/nowhere", "/v1/score"):
        answer = demo.get(path, headers={"Host": "evil.example:80"})
        message = check_error(answer, 400, "invalid_request", "Host")
        assert "--allowed-hosts" in message
        assert "evil" not in message
    assert demo.get("/health", headers={"Host": "localhost"}).status_code == 200
