"""Fixtures of all client tests. They run in the client's own environment, so they use only the
standard library and pytest; run.py passes the server's address."""

import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from asked import DOCUMENTS, QUERY

IN_FLIGHT = 2  # the server's --max-inflight-per-key
RELEASE_AFTER = 0.5  # seconds; the server asks for one


@dataclass(frozen=True)
class Server:
    url: str
    key: str

    def post(self, path: str, body: object) -> Any:
        """Post a body without any client library and return the answer's JSON."""
        with urllib.request.urlopen(self._request(path, body), timeout=60) as answer:
            return json.load(answer)

    def _request(self, path: str, body: object) -> urllib.request.Request:
        fields = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        return urllib.request.Request(self.url + path, json.dumps(body).encode(), fields)

    def in_flight(self) -> int:
        """Return the number of requests that the engine has taken and not yet answered."""
        request = urllib.request.Request(
            self.url + "/metrics", headers={"Authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        (line,) = (line for line in lines if line.startswith("gpuscore_requests_waiting{"))
        return int(float(line.split()[-1]))

    def hold(self) -> socket.socket:
        """Send a request of 50,000 tokens, seconds of work; it is in flight until the socket is
        closed."""
        request = self._request(
            "/v1/score",
            {"items": [[i % 90 + 5] * 500 for i in range(100)], "label_token_ids": [1]},
        )
        address = urlsplit(self.url)
        held = socket.create_connection((address.hostname, address.port))
        fields = [f"{name}: {value}" for name, value in request.header_items()]
        fields += [f"Host: {address.netloc}", f"Content-Length: {len(request.data)}"]
        head = "\r\n".join(["POST /v1/score HTTP/1.1", *fields, "", ""])
        held.sendall(head.encode() + request.data)
        return held


@pytest.fixture(scope="session")
def server() -> Server:
    return Server(os.environ["SERVER_URL"], os.environ["SERVER_KEY"])


@pytest.fixture(scope="session")
def ranking(server: Server) -> list[tuple[int, float]]:
    """Index and score of every document, best first, from POST /v1/score with the whole prompts:
    the result that every client must get."""
    prompts = [f"query: {QUERY}\nitem: {document}" for document in DOCUMENTS]
    body = {"items": prompts, "labels": ["yes", "no"], "apply_softmax": True}
    scores = [row[0] for row in server.post("/v1/score", body)["scores"]]
    assert len(set(scores)) == len(scores)
    assert max(scores) > 0.9 > 0.5 > min(scores), "the demo model knows its chairs"
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


@pytest.fixture(scope="session")
def is_same():
    """is_same(found, expected) -> True for equal order and scores equal up to float32 rounding in a
    batch."""

    def same(got: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
        return [i for i, _ in got] == [i for i, _ in expected] and [s for _, s in got] == (
            pytest.approx([s for _, s in expected], abs=1e-5)
        )

    return same


@dataclass
class Stopwatch:
    started: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@contextmanager
def no_room(server: Server) -> Iterator[None]:
    """Hold as many requests in flight as this key may have."""
    with ExitStack() as stack:
        for _ in range(IN_FLIGHT):
            stack.enter_context(server.hold())
        deadline = time.monotonic() + 10
        while server.in_flight() < IN_FLIGHT:
            assert time.monotonic() < deadline
        yield


@pytest.fixture
def full(server: Server) -> Iterator[None]:
    """The server has no room for this key's requests while the test runs."""
    with no_room(server):
        yield


@pytest.fixture
def full_at_first(server: Server) -> Iterator[Stopwatch]:
    """The server has no room for this key's next request, refuses it with 429 and a Retry-After of
    one second, and has room again before that second is over."""
    with ExitStack() as stack:
        stack.enter_context(no_room(server))
        release = threading.Timer(RELEASE_AFTER, stack.close)
        release.start()
        yield Stopwatch(time.monotonic())
        release.join()
