"""Promise: whatever bytes arrive, as heads or as bodies of any route, a server answers in HTTP or
closes in time, fails with no 5xx or traceback, and is as it was.

tests/server/test_protocol.py compares what a connection reads with another parser's requests.
"""

import json
import random
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuscore.dialects.table import DIALECT_OF
from support.floods import TELLING, UPGRADE
from support.serving import RunningServer
from support.vitals import Patient

pytestmark = pytest.mark.hostile

STREAMS, SEED = 2_000, 14  # of changed requests, and as many with changed bodies
LATEST = 8.0  # seconds between two bytes, over all deadlines of `server`
BODY = b'{"items":[[5]],"label_token_ids":[3]}'
LENGTH = b"Content-Length: %d\r\n\r\n"
SIZED = LENGTH % len(BODY) + BODY
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (
    len(BODY),
    BODY,
)
SCORE = b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
GOOD = (SCORE + SIZED, SCORE + CHUNKS, SCORE + UPGRADE + SIZED, SCORE + UPGRADE + CHUNKS, GET)
LAST = b"GET /nowhere HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
EXAMPLES = [(path.encode(), json.dumps(kind.example).encode()) for path, kind in DIALECT_OF.items()]
ANSWER = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [ -~]*\r\n((?:[!-9;-~]+: [ -~]*\r\n)*)\r\n")
SIZE = re.compile(rb"content-length: ([0-9]+)")


def streams() -> Iterator[bytes]:
    """Yield some good requests, a few bytes of them changed, or one whose body is changed, and a
    last one each."""
    rng = random.Random(SEED)

    def changed(data: bytes) -> bytes:
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(data) + 1)
            end = start + rng.choice((0, 1, 2, 8, 40))
            new = rng.choice((rng.choice(TELLING), data[start:end] * 2, b"", rng.randbytes(3)))
            data = data[:start] + new + data[end:]
        return data

    for _ in range(STREAMS):
        yield changed(b"".join(rng.choices(GOOD, k=rng.randint(1, 3)))) + LAST
        path, example = rng.choice(EXAMPLES)
        body = changed(example)
        yield SCORE.replace(b"/v1/score", path) + LENGTH % len(body) + body + LAST


def harm(address: tuple[str, int], data: bytes) -> str:
    """Return what is wrong with the answers to a stream; empty if nothing is."""
    received, reset = b"", False
    with socket.create_connection(address, timeout=LATEST) as connection:
        try:
            connection.sendall(data)
            while part := connection.recv(2**16):
                received += part
        except ConnectionError:  # it was refused, and the rest not read
            reset = True
        except TimeoutError:
            return f"no end: {data!r}: {received!r}"
    while received:
        answer = ANSWER.match(received)
        if answer is None or (answer[1] >= b"500" and answer[1] not in (b"501", b"505")):
            return f"{data!r}: {received!r}"
        length = SIZE.search(answer[2])
        end = answer.end() + int(length[1] if length else 0)
        if end > len(received) and not reset:
            return f"cut off: {data!r}: {received!r}"
        received = received[end:]
    return ""


def test_noise(server: RunningServer, patient: Patient, log: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        harms = threads.map(lambda data: harm(server.address, data), streams())
        assert [text for text in harms if text] == []
    patient.check("changed streams")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line for line in lines if line["level"] not in ("info", "warning")] == []
