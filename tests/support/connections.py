"""Raw HTTP/1.1, the canary, and the check of error replies."""

import json
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import ANY
from uuid import uuid4

import httpx

from support.serving import RunningServer, wait_until

# A mark in callers' texts and keys: no reply may contain it.
MARKER = "Grüner-Marker-7c41-xyz"
MAX_ERROR_BYTES = 2048
KEYS = ("key-of-alice", "key-of-bob", "schlüssel-of-carol")  # keys of the limited server
VOLATILE = {"id", "created", "cached_tokens"}  # fields that differ between equal requests
POISON = 7  # a label whose logit is not finite in the limited server's model


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class Connection:
    """One connection to a client's server, for bytes that an HTTP client would not send."""

    def __init__(self, client: httpx.Client, timeout: float = 30.0) -> None:
        keys = [value for name, value in client.headers.raw if name.lower() == b"authorization"]
        self._key = keys[0].decode() if keys else None
        self.socket = socket.create_connection(
            (client.base_url.host, client.base_url.port), timeout=timeout
        )
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(
        self,
        method: str = "POST",
        path: str = "/v1/score",
        *fields: str,
        body: bytes | None = None,
        length: int | None = None,
        key: bool = True,
    ) -> None:
        """Send a head and a body; `length` announces a length other than the body's."""
        self.send(self.head(method, path, *fields, body=body, length=length, key=key))
        self.send(body or b"")

    def head(
        self,
        method: str = "POST",
        path: str = "/v1/score",
        *fields: str,
        body: bytes | None = None,
        length: int | None = None,
        key: bool = True,
    ) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", *fields]
        if not any(field.lower().startswith("host:") for field in fields):
            lines.append("Host: 127.0.0.1")
        if key and self._key is not None:
            lines.append(f"Authorization: {self._key}")
        if body is not None or length is not None:
            lines.append("Content-Type: application/json")
            lines.append(f"Content-Length: {len(body or b'') if length is None else length}")
        return "\r\n".join([*lines, "", ""]).encode()

    def reply(self, *, has_body: bool = True) -> Reply:
        """Read one reply, after any interim ones; raise ConnectionError if the server closed
        without one."""
        status, headers = self._head()
        while status < 200:  # 100 Continue, which the server may send whenever an answer takes long
            status, headers = self._head()
        length = int(headers.get("content-length", "0")) if has_body else 0
        body = self._chunks() if "transfer-encoding" in headers else self._file.read(length)
        return Reply(status, headers, body)

    def interim(self) -> int:
        """Read the head of an interim reply; return its status."""
        return self._head()[0]

    def _head(self) -> tuple[int, dict[str, str]]:
        status = self._file.readline().split()
        if not status:
            raise ConnectionError("closed without a reply")
        headers = {}
        while line := self._file.readline().strip().decode("latin-1"):
            name, value = line.split(":", 1)
            headers[name.strip().lower()] = value.strip()
        return int(status[1]), headers

    def _chunks(self) -> bytes:
        chunks = []
        while size := int(self._file.readline(), 16):
            chunks.append(self._file.read(size))
            assert self._file.read(2) == b"\r\n"
        assert self._file.readline() == b"\r\n"
        return b"".join(chunks)

    @property
    def closed(self) -> bool:
        """True if the server has closed the connection; waits for it."""
        return self._file.read(1) == b""

    @property
    def silent(self) -> bool:
        """True if nothing has arrived, not even the connection's end."""
        self.socket.setblocking(False)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            self.socket.settimeout(30)


def connected(server: RunningServer, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    # Drop connections before the server's keep-alive time, so that a client never uses a closed
    # one.
    limits = httpx.Limits(keepalive_expiry=2)
    return httpx.Client(
        base_url=server.url,
        headers=headers,
        limits=limits,
        timeout=60,
        trust_env=False,
        verify=False,  # reading certificates takes 25 ms, and no test speaks TLS
    )


def score(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/v1/score", json=body)


def post(client: httpx.Client, body: bytes, **headers: str) -> httpx.Response:
    """Send exactly these bytes as a JSON body."""
    sent = {"content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    return client.post("/v1/score", content=body, headers=sent)


def canary(client: httpx.Client) -> str:
    """Return the scores of a fixed request as the server wrote them, computed without the prefix
    cache."""
    answer = score(
        client,
        query=[5, 6, 7, 8, 9],
        items=[[10], [11, 12], [13, 14, 15], [16]],
        label_token_ids=[3, 17, 390],
        apply_softmax=True,
        cache_salt=uuid4().hex,
    )
    assert answer.status_code == 200, answer.text
    return answer.text.split('"scores":')[1].split("]]")[0]


def check_error(reply: Reply | httpx.Response, status: int, code: str, param: object = ANY) -> str:
    """Assert that a reply is the contract's error body; return its message."""
    got, raw = (
        (reply.status_code, reply.content)
        if isinstance(reply, httpx.Response)
        else (reply.status, reply.body)
    )
    head = "".join(f"{name}: {value}\n" for name, value in reply.headers.items())
    assert got == status, raw
    assert len(raw) <= MAX_ERROR_BYTES
    assert MARKER not in head + raw.decode()
    assert json.dumps(MARKER)[1:-1] not in raw.decode()
    assert reply.headers["content-type"] == "application/json"
    body = json.loads(raw)
    error = body.pop("error")
    if body:  # /rerank adds it
        assert body == {"detail": ": ".join(filter(None, (error["code"], error["param"])))}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    kinds = {429: "rate_limit_error"}  # otherwise LiteLLM would report a bad request
    usual = "invalid_request_error" if status < 500 else "server_error"
    assert error["type"] == kinds.get(status, usual)
    assert error["param"] == param, error
    assert error["param"] is None or isinstance(error["param"], str)
    assert isinstance(error["message"], str)
    assert error["message"]
    return error["message"]


def retry_after(reply: Reply | httpx.Response) -> int:
    """Return the header's value; int() accepts only an integer."""
    return int(reply.headers["retry-after"])


def large_request(tokens: int, **fields: object) -> bytes:
    """Return a body whose items share nothing, so that all tokens have to be computed."""
    tail = [7] * 498
    items = [[i // 300, i % 300, *tail] for i in range(tokens // 500)]
    return json.dumps({"items": items, "label_token_ids": [3]} | fields).encode()


def hold(client: httpx.Client, connection: Connection, body: bytes) -> None:
    """Send a large_request and return once the engine's process has it."""
    connection.request(body=body)
    wait_until(lambda: metric(client, "requests_waiting") >= 1)


def metric(client: httpx.Client, name: str) -> float:
    """Return the value of a metric without labels but the model's and the first replica's."""
    labels = r'(?:\{(?:model="[^"]*",?)?(?:replica="0")?\})?'
    text = client.get("/metrics").text
    (value,) = re.findall(rf"^gpuscore_{name}{labels} (\S+)$", text, re.MULTILINE)
    return float(value)


def under_way(client: httpx.Client) -> int:
    """Return the number of requests whose heads the server has read, except the one that asks."""
    return int(metric(client, "requests_running")) - 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def same_answer(
    got: Any,
    expected: Any,
    tolerance: float = 1e-4,
    but: Collection[str] = VOLATILE,
    where: str = "answer",
) -> None:
    """Assert that answers are equal but for the fields `but` and small differences of numbers."""
    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected.keys() - but:
            same_answer(got[key], expected[key], tolerance, but, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for index, (element, other) in enumerate(zip(got, expected, strict=True)):
            same_answer(element, other, tolerance, but, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert abs(got - expected) <= tolerance, where
    else:
        assert got == expected, where
