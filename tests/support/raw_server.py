"""A loopback server that answers with whatever bytes a test writes, for tests of clients."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile

NAME = "raw server"  # of its threads
Answer = Callable[[], Iterable[bytes]]


@dataclass
class RawServer:
    url: str
    requests: int = 0
    sent: int = 0  # bytes of all answers
    ended: threading.Event = field(default_factory=threading.Event)  # the test is over


def slowly(pieces: Iterable[bytes], seconds: float = 0.05) -> Iterator[bytes]:
    for piece in pieces:
        time.sleep(seconds)
        yield piece


@contextmanager
def answering(answer: Answer, *, read: bool = True) -> Iterator[RawServer]:
    """Answer every request with the pieces of `answer()`, until the client hangs up.

    Args:
        answer: the pieces of a whole answer, with its head.
        read: False: requests are read a byte at a time, and never answered.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    server = RawServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    opened: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            while not read and not server.ended.wait(0.05):
                connection.recv(1)
            while not server.ended.is_set():
                _read_request(connection)
                server.requests += 1
                for piece in takewhile(lambda _: not server.ended.is_set(), answer()):
                    connection.sendall(piece)
                    server.sent += len(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                opened.append(connection)
                threading.Thread(target=serve, args=[connection], name=NAME, daemon=True).start()

    threading.Thread(target=accept, name=NAME, daemon=True).start()
    try:
        yield server
    finally:
        server.ended.set()
        listener.close()
        for connection in opened:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _read_request(connection: socket.socket) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        head += _some(connection, 2**16)
    head, _, body = head.lower().partition(b"\r\n\r\n")
    length = re.search(rb"\ncontent-length: *([0-9]+)", head)
    left = int(length[1] if length else 0) - len(body)
    while left > 0:
        left -= len(_some(connection, left))


def _some(connection: socket.socket, most: int) -> bytes:
    if not (got := connection.recv(most)):
        raise EOFError
    return got
