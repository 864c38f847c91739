"""The names by which a server may be called, as the Host field and absolute targets give them.

A web page can make its own name point to the reader's machine (DNS rebinding). The browser then
lets it read a server on loopback, which without keys trusts everybody there. The name is the page's
all the same, so such a server answers to names that only mean loopback.
"""

import ipaddress
import re
from collections.abc import Iterator

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.types.record import Headers

ANY = "*"
_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_AUTHORITY = re.compile(rb"[^/]*://([^/]*)")
_PORT = re.compile(r":[0-9]*\Z")


class Hosts:
    """Loopback names and those given; all names without any given."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names

    def check(self, target: bytes, headers: Headers) -> None:
        """Raise InvalidRequest if a head calls the server by another name.

        A head without a name passes: browsers always send one.
        """
        names = self._names
        if names is None or all(_known(one, names) for one in _names_of(target, headers)):
            return
        raise InvalidRequest(
            "this server answers to loopback names (localhost, 127.0.0.1, [::1]) and those of "
            "--allowed-hosts, not to the one of this request",
            param="Host",
        )


ANY_HOST = Hosts()


def read_hosts(config: ServerConfig, host: str, keys: int) -> Hosts:
    """Return the names for a server that binds `host` and has so many keys.

    Raises:
        ConfigError: `--allowed-hosts` has what no Host field could be.
    """
    if config.allowed_hosts is None:
        return ANY_HOST if keys or not is_loopback(host) else Hosts(frozenset())
    given = [name.strip().lower().removesuffix(".") for name in config.allowed_hosts.split(",")]
    if given == [ANY]:
        return ANY_HOST
    if not all(map(_NAME.fullmatch, given)):
        raise ConfigError(
            f"--allowed-hosts {config.allowed_hosts}: a name is a host without a port, such as "
            "scores.example.org or [fd00::1]; * alone allows any"
        )
    bound = f"[{host}]" if ":" in host else host
    return Hosts(frozenset((*given, bound)))


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _known(given: str, names: frozenset[str]) -> bool:
    name = _PORT.sub("", given.lower()).removesuffix(".")
    if not name or name in names or name.endswith(".localhost"):
        return True
    return is_loopback(name.strip("[]"))


def _names_of(target: bytes, headers: Headers) -> Iterator[str]:
    if not target.startswith(b"/") and (found := _AUTHORITY.match(target)):
        yield found[1].decode("latin-1")
    for name, value in headers:
        if name == b"host":
            yield value.decode("latin-1")
