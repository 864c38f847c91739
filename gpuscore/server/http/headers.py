"""Header fields: the server's name, and the request's timeout.

A web page can make its own name point to the reader's machine (DNS rebinding). The browser then
lets it read a server on loopback, which without keys trusts everybody there. But the request names
the page's host, so such a server answers only to names that always mean loopback.
"""

import ipaddress
import re

from starlette.requests import Request

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.types.record import Headers

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
ANY = "*"  # host name
_DIGITS = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_PORT = re.compile(r":[0-9]*\Z")


def request_seconds(request: Request, longest: float) -> float:
    """Return the seconds in which the request must be answered; `longest` without a header.

    Raises InvalidRequest unless the header is an integer of milliseconds from 1 to `longest`.
    """
    values = request.headers.getlist(TIMEOUT_HEADER)
    if not values:
        return longest
    most = int(longest * 1000)
    milliseconds = int(values[0]) if len(values) == 1 and _DIGITS.fullmatch(values[0]) else 0
    if not 1 <= milliseconds <= most:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be given once, as an integer from 1 to {most}",
            param=TIMEOUT_HEADER,
        )
    return milliseconds / 1000


def check_host(headers: Headers, names: frozenset[str] | None) -> None:
    """Raise InvalidRequest if a head calls the server neither by a loopback name nor one of these.

    A head without a name passes: browsers always send one. So does any name if `names` is None.
    """
    if names is None:
        return
    for name, value in headers:
        if name == b"host" and not _known(value.decode("latin-1"), names):
            raise InvalidRequest(
                "this server answers to loopback names (localhost, 127.0.0.1, [::1]) and names "
                "of --allowed-hosts, not to the name of this request",
                param="Host",
            )


def read_hosts(config: ServerConfig, host: str, keys: int) -> frozenset[str] | None:
    """Return the names, besides loopback names, of a server that binds `host` and has so many keys;
    None if it answers to any.

    Raises:
        ConfigError: `--allowed-hosts` has a value that no Host field can have.
    """
    if config.allowed_hosts is None:
        return None if keys or not is_loopback(host) else frozenset()
    allowed = [name.strip().lower().removesuffix(".") for name in config.allowed_hosts.split(",")]
    if allowed == [ANY]:
        return None
    if not all(map(_NAME.fullmatch, allowed)):
        raise ConfigError(
            f"--allowed-hosts {config.allowed_hosts}: a name is a host without a port, such as "
            "scores.example.org or [fd00::1]; * alone allows any"
        )
    bound = f"[{host}]" if ":" in host else host
    return frozenset((*allowed, bound))


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _known(host: str, names: frozenset[str]) -> bool:
    name = _PORT.sub("", host.lower()).removesuffix(".")
    if not name or name in names or name.endswith(".localhost"):
        return True
    return is_loopback(name.strip("[]"))
