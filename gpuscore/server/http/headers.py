"""Heads of requests: checks that llhttp leaves to its user, the server's name, API keys and their
renewal by a signal, and the request's timeout.

A web page can make its own name point to the reader's machine (DNS rebinding). The browser then
lets it read a server on loopback, which without keys trusts everybody there. But the request names
the page's host, so such a server answers only to names that always mean loopback.
"""

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import threading
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request

from gpuscore.config import API_KEY_VARIABLE, ServerConfig
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.types.record import Headers

logger = logging.getLogger(__name__)

KEY_HEADERS = (b"authorization", b"x-api-key")
COMMENT = "#"  # begins a line of a key file that is no key
NO_KEY = "no-key"  # the tenant of every caller if no key is set
TIMEOUT_HEADER = "X-Request-Timeout-Ms"
_DIGITS = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_PORT = re.compile(r":[0-9]*\Z")
END = b"\r\n\r\n"  # of a head, and of a body in chunks
# Empty lines, a request line and fields as RFC 9112 defines them, without lines that are folded.
_HEAD = re.compile(
    rb"(?:\r\n)*+[A-Z-]{1,20}+ /[!\"$-~]*+ HTTP/1\.[01]\r\n"
    rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+\r\n"
)
# As much of a method as has arrived.
_BEGINNING = re.compile(rb"(?:\r\n)*+(?:\r?\Z|[A-Z-]{1,20}(?: |\Z))")
_BARE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])")
_UPGRADE = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
_IGNORED = b"upgrade-ignored:"  # the application sees the field by this name
# RFC 9112 (3.2): a Host field that is not a host with an optional port gets 400. A host is a
# reg-name of RFC 3986 (3.2.2) or an address in brackets.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+;=%-]*)(:[0-9]*)?")


def invalid() -> InvalidRequest:
    return InvalidRequest("the request is not valid HTTP")


def check_beginning(data: bytearray, start: int) -> None:
    """Raise InvalidRequest if no valid head begins like this; bytes before `start` are checked."""
    if _BARE.search(data, start) or not _BEGINNING.match(data):
        raise invalid()


def readable(head: bytes) -> bytes:
    """Hide the upgrade, at which llhttp would stop; raise InvalidRequest for a malformed head."""
    if not _HEAD.fullmatch(head):
        raise invalid()
    return _UPGRADE.sub(_IGNORED, head) if b"pgrade" in head.lower() else head


def body_length(headers: Headers, version: str) -> int | None:
    """Return the bytes of the body after a head that llhttp has parsed; None if it is in chunks.

    Raises InvalidRequest for a Host or a coding that a proxy could understand differently.
    """
    hosts = 0
    length = 0
    chunked = False
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _HOST.fullmatch(value):
                raise invalid()
        elif name == b"content-length":
            length = int(value)  # llhttp has checked the digits, and that the field is unique
        elif name == b"transfer-encoding":
            chunked = True
            if value.lower() != b"chunked" or version == "1.0":  # RFC 9112 (6.1)
                raise invalid()
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise invalid()
    return None if chunked else length


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
    """Raise InvalidRequest unless a head names the server by a loopback name or one of `names`.

    A head without a name passes: browsers always send one. So does any name if `names` is None.
    """
    host = dict(headers).get(b"host")  # `body_length` refuses a head with two
    if names is not None and host is not None and not _known(host, names):
        raise InvalidRequest(
            "this server answers to loopback names (localhost, 127.0.0.1, [::1]) and names of "
            "--allowed-hosts, not to the name of this request",
            param="Host",
        )


def read_hosts(config: ServerConfig, keys: int) -> frozenset[str] | None:
    """Return the names, besides loopback names, that a server with `keys` keys answers to; None =
    any name.

    Raises:
        ConfigError: `--allowed-hosts` has a value that no Host field can have.
    """
    if config.allowed_hosts is None:
        return None if keys or not is_loopback(config.host) else frozenset()
    allowed = [name.strip().lower().removesuffix(".") for name in config.allowed_hosts.split(",")]
    if allowed == ["*"]:
        return None
    if not all(map(_NAME.fullmatch, allowed)):
        raise ConfigError(
            f"--allowed-hosts {config.allowed_hosts}: a name is a host without a port, such as "
            "scores.example.org or [fd00::1]; * alone allows any"
        )
    bound = f"[{config.host}]" if ":" in config.host else config.host
    return frozenset((*allowed, bound))


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(16)  # most requests use one name
def _known(host: bytes, names: frozenset[str]) -> bool:
    name = _PORT.sub("", host.decode("latin-1").lower()).removesuffix(".")
    if not name or name in names or name.endswith(".localhost"):
        return True
    return is_loopback(name.strip("[]"))


class ApiKeys:
    """Digests of the valid keys; without any, every caller is accepted."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def start_reading(self, config: ServerConfig) -> None:
        """Read the keys again, in a thread, because the disk may be slow; keep these if it fails.

        Requests that were accepted before go on.
        """

        def read() -> None:
            try:
                self._digests = read_api_keys(config)._digests
            except ConfigError as error:
                logger.error("the API keys were not reloaded: %s", error)
            else:
                logger.warning("the API keys were reloaded: %d are valid", len(self))

        threading.Thread(target=read, name="api-keys", daemon=True).start()

    def tenant(self, headers: Headers) -> str | None:
        """Return a name for the key's owner, or None if the head has no valid key, or several.

        A key is read from Authorization, after "Bearer" or alone, or from X-Api-Key: clients of
        different servers send it differently. Digests are compared in constant time, and all of
        them are compared even after a match.
        """
        digests = self._digests  # read once: another thread may replace them
        if not digests:
            return NO_KEY
        sent = [(name, _key(name, value)) for name, value in headers if name in KEY_HEADERS]
        keys = {key for _, key in sent}
        # With two keys, a proxy could read one and this server the other, and they would disagree
        # about the request's owner.
        clear = len(keys) == 1 and len(sent) == len({name for name, _ in sent})
        digest = hashlib.sha256(keys.pop() if clear else b"").digest()
        matches = [hmac.compare_digest(digest, known) for known in digests]
        return digest.hex()[:16] if any(matches) else None


def _key(name: bytes, value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    is_bearer = name == b"authorization" and scheme.lower() == b"bearer"
    return key.strip() if is_bearer else value.strip()


def read_api_keys(config: ServerConfig) -> ApiKeys:
    """Return the keys of the environment and of the key file.

    A key is never taken from the command line, where every user of the machine could read it.

    Raises:
        ConfigError: the key file cannot be read or holds no key; or there is no key, the address is
            reachable from other machines and `--insecure` was not given.
    """
    keys = [os.environ.get(API_KEY_VARIABLE, "").strip()]
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {config.api_key_file}: {error}") from error
        keys += [line for line in lines if not line.lstrip().startswith(COMMENT)]
    api_keys = ApiKeys([key.strip().encode() for key in keys if key.strip()])
    if config.api_key_file is not None and not api_keys:
        raise ConfigError(f"--api-key-file {config.api_key_file} holds no key")
    if not api_keys and not config.insecure and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} is reachable from other machines and no API key is set: set "
            f"{API_KEY_VARIABLE} or --api-key-file, or pass --insecure"
        )
    return api_keys
