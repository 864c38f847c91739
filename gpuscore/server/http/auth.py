"""API keys: the set of valid ones, and its renewal by a signal."""

import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path

from gpuscore.config import API_KEY_VARIABLE, ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.server.http.headers import is_loopback
from gpuscore.types.record import Headers

logger = logging.getLogger(__name__)

KEY_HEADERS = (b"authorization", b"x-api-key")
COMMENT = "#"  # begins a line of a key file that is no key
NO_KEY = "no-key"  # the tenant of every caller if no key is set


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
                logger.error("the API keys stay as they are: %s", error)
            else:
                logger.warning("the API keys were read again: %d are valid", len(self))

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
        # Of two keys a proxy could read one and we the other, and so take the request for two
        # different owners'.
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
