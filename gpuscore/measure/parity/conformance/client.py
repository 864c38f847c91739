"""A plain HTTP client of a server with POST /v1/score, with the standard library only."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A server's answer; without one, `status` is 0 and `text` has the reason."""

    status: int
    text: str

    @property
    def body(self) -> Any:
        """The answer's JSON, or None if it is not JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    @property
    def message(self) -> str | None:
        """The message of an error in OpenAI's shape or in SGLang's flat one; None without one."""
        body = self.body if isinstance(self.body, dict) else {}
        error = body.get("error", body)
        found = error.get("message") if isinstance(error, dict) else None
        return found if isinstance(found, str) else None

    def __str__(self) -> str:
        return f"status {self.status}: {self.text[:200]}" if self.status else self.text


class PlainClient:
    """A thread-safe client that opens one connection per request.

    Args:
        url: http or https, with or without a path before /v1/score.
        key: sent as bearer token, or None.
        timeout: seconds for connecting and for every read.

    Raises:
        ConfigError: the URL is not of this form.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL {url}: must begin with http:// or https:// and name a host")
        self.url, self._parts, self._timeout = url.rstrip("/"), parts, timeout
        self._headers = {"Authorization": f"Bearer {key}".encode()} if key else {}

    def score(self, body: object) -> ServerReply:
        return self.post("/v1/score", json.dumps(body).encode())

    def post(self, path: str, content: bytes, kind: str = "application/json") -> ServerReply:
        return self._send("POST", path, content, {"Content-Type": kind})

    def get(self, path: str) -> ServerReply:
        return self._send("GET", path, None, {})

    def _send(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str]
    ) -> ServerReply:
        make = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = make(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        try:
            target = self._parts.path.rstrip("/") + path
            connection.request(method, target, content, {**self._headers, **headers})
            answer = connection.getresponse()
            return ServerReply(answer.status, answer.read().decode(errors="replace"))
        except (OSError, http.client.HTTPException) as error:
            return ServerReply(0, f"no answer: {error!r}")
        finally:
            connection.close()
