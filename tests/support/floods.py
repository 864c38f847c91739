"""Connections that send as much as a server accepts, in a process of their own so that the
measuring process is not slowed down.

    python -P -m support.floods KIND HOST PORT CONNECTIONS SECONDS MEGABYTES

KIND is one of KINDS, or a file with a request that each connection sends again and again.
"""

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

PIECE = 2**16
# Bytes that mean something to a parser of HTTP or of JSON, for tests that change requests.
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
TELLING = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"%", b"#", b"\x7f", b"\xff"),
    *(b"\r\n\r\n", b"0\r\n\r\n", b"\r\n ", b"ffffffffffffffff", b"0x", b"_", b"-", b"+"),
    *(b"HTTP/1.0", b"HTTP/2.0", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"chunked"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", UPGRADE),
    *(b"Host: b\r\n", b"Connection: close\r\n", b"Expect: 100-continue", b"X-Request-Id: a\r\n"),
    *(b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n", b"A" * 30, b"A" * 300, b"a: b\r\n" * 99),
    *(b'"', b"{", b"[[", b"null", b"-1", b"1e400", b"0.5", b"\\ud800", b"true", b'"":'),
)
CHUNKED = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
# The bytes that a connection sends first, and those that it then repeats for as long as it can.
KINDS = {
    "pipelined": (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "trailers": (CHUNKED + b"0\r\nX: ", b"a"),
    "extensions": (CHUNKED + b"1;", b"a"),
    "one-byte chunks": (CHUNKED, b"1\r\n \r\n"),
}


@dataclass
class Sent:
    """The totals of a flood.

    Args:
        connections: opened connections, replacements included.
        sent: bytes.
        answers: heads of answers, roughly.
        received: bytes.
    """

    connections: int = 0
    sent: int = 0
    answers: int = 0
    received: int = 0


class Flood:
    """A flood over `width` connections, at most `most` bytes each; connections that the server
    closes are replaced."""

    def __init__(self, kind: str, address: tuple[str, int], width: int, most: int) -> None:
        self.result = Sent()
        self._address, self._most = address, most
        first, unit = KINDS[kind] if kind in KINDS else (b"", Path(kind).read_bytes())
        count = max(1, PIECE // len(unit))
        self._first, self._piece = first + unit * count, unit * count
        self._selector = selectors.DefaultSelector()
        self._left: dict[socket.socket, int] = {}  # bytes that each connection may still send
        self._pending: dict[socket.socket, memoryview] = {}
        for _ in range(width):
            self._open()

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key, events in self._selector.select(0.1):
                self._move(key.fileobj, events)

    def _open(self) -> None:
        connection = socket.create_connection(self._address)
        connection.setblocking(False)
        self.result.connections += 1
        self._left[connection] = self._most
        self._pending[connection] = memoryview(self._first)
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _move(self, connection: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                received = connection.recv(2**18)
                self.result.answers += received.count(b"HTTP/1.1 ")
                self.result.received += len(received)
                if not received:
                    raise ConnectionError
            if events & selectors.EVENT_WRITE:
                self._send(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._selector.unregister(connection)
            connection.close()
            del self._left[connection], self._pending[connection]
            self._open()

    def _send(self, connection: socket.socket) -> None:
        sent = connection.send(self._pending[connection])
        self.result.sent += sent
        self._left[connection] -= sent
        self._pending[connection] = self._pending[connection][sent:]
        if self._left[connection] <= 0:
            self._selector.modify(connection, selectors.EVENT_READ)
        elif not self._pending[connection]:
            self._pending[connection] = memoryview(self._piece)


def flooding(
    kind: str, address: tuple[str, int], width: int, seconds: float, megabytes: float
) -> "subprocess.Popen[str]":
    """Start a flood in the background; `sent_by` waits for its end."""
    arguments = [kind, address[0], *map(str, (address[1], width, seconds, megabytes))]
    return subprocess.Popen(
        [sys.executable, "-P", __file__, *arguments], stdout=subprocess.PIPE, text=True
    )


def sent_by(flood: "subprocess.Popen[str]") -> Sent:
    output, _ = flood.communicate(timeout=120)
    assert flood.returncode == 0
    return Sent(**json.loads(output))


def main(kind: str, host: str, port: str, width: str, seconds: str, megabytes: str) -> None:
    flood = Flood(kind, (host, int(port)), int(width), int(float(megabytes) * 1e6))
    flood.run(float(seconds))
    print(json.dumps(asdict(flood.result)))


if __name__ == "__main__":
    main(*sys.argv[1:])


def probe(address: tuple[str, int]) -> float:
    """Return the seconds that /health takes on a connection of its own."""
    start = time.monotonic()
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 ")
    return time.monotonic() - start


def slowest(probe: Callable[[], float], busy: Callable[[], bool]) -> float:
    """Return the seconds of the slowest probe while `busy` is true, and of one at least."""
    took = probe()
    while busy():
        time.sleep(0.02)
        took = max(took, probe())
    return took
