"""Promise: no request of one key, however long its text, delays another key's, and its memory is
freed; a client that reads slowly holds its answer, which is counted.

tests/hostile/test_multiplied.py asks for large answers.

Each flood lasts `SECONDS`, after the same time without one.
"""

import gzip
import json
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.connections import Connection, connected, under_way
from support.floods import flooding, sent_by
from support.serving import RunningServer, serving, wait_until
from support.vitals import MIB

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

FLOODER, VICTIM = "key-of-the-flooder", "key-of-the-victim"
SECONDS = 5.0
SIZE = 16_000_000  # bytes of a text; a body may have 16 MiB
MEDIAN, TIMES = 0.2, 5  # seconds; or times as long as without the flood
LONGEST = 3.0  # seconds, for one of a handful of requests on a machine with other work
GROWTH = 60 * MIB  # Python's own allocator keeps blocks in which one small object lives on
# A slow reader may hold its answer of 53 MB, of which --max-queued-bytes counts what it can have at
# most, and pieces of it; Python numbers of it would be twice that.
READERS, HELD = 6, 20 * MIB

ENGLISH = "The quick brown fox jumps over the lazy dogs, and nobody knows who has told it to. "
LABELS = ["yes", "no"]


def text(piece: str) -> str:
    return piece * (SIZE // len(piece.encode()))


def scored(query: str, items: list[str], labels: list[str] = LABELS) -> tuple[str, object]:
    return "/v1/score", {"query": query, "items": items, "labels": labels}


TINY = {
    "score": scored("query: a lamp\nitem: ", ["A lamp."]),
    "rerank": ("/v1/rerank", {"query": "a lamp", "documents": ["A lamp.", "A chair."]}),
    "tokenize": ("/tokenize", {"prompt": "A red steel lamp."}),
}
FLOODS = {
    "one item of English": lambda: scored("", [text(ENGLISH)]),
    "no place to cut: letters": lambda: scored("", [text("a")]),
    "10,000 items": lambda: scored("q", [f"{i} {ENGLISH * 19}" for i in range(10_000)]),
    "a long query": lambda: scored(text(ENGLISH), ["a"] * 100),
    "long labels": lambda: scored("q", ["a"], [text(ENGLISH)[: SIZE // 128]] * 128),
    "tokenize letters": lambda: ("/tokenize", {"prompt": text("a")}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{FLOODER}\n{VICTIM}\n")
    # All slow readers are let in at once: what they hold is measured, not how many there are.
    limits = ("--max-queued-bytes", str(2**31), "--max-queue-seconds", "3600")
    flags = ("--threads", "1", "--api-key-file", str(keys), "--no-log-requests", *limits)
    with serving("demo", *flags, fork=False) as running:
        yield running


def request_of(path: str, body: object, *fields: str) -> bytes:
    content = json.dumps(body, ensure_ascii=False).encode()
    content = gzip.compress(content) if "Content-Encoding: gzip" in fields else content
    lines = [
        *(f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {FLOODER}"),
        *("Content-Type: application/json", f"Content-Length: {len(content)}", *fields),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def measured(client: httpx.Client) -> dict[str, list[float]]:
    """Send the victim's requests and probes one after another; return each kind's seconds."""
    seconds: dict[str, list[float]] = {}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for kind, asked in {**TINY, "health": None}.items():
            start = time.monotonic()
            answer = client.post(asked[0], json=asked[1]) if asked else client.get("/health")
            seconds.setdefault(kind, []).append(time.monotonic() - start)
            assert answer.status_code == 200, answer.text
        time.sleep(0.02)
    return seconds


def shown(seconds: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{kind} {1e3 * statistics.median(all):.0f} to {1e3 * max(all):.0f} ms of {len(all)}"
        for kind, all in seconds.items()
    )


@pytest.mark.parametrize("name", FLOODS)
def test_texts_delay_nobody(server, patient_of, tmp_path, record_property, name):
    """The flooder gives up after a second and asks again."""
    request = tmp_path / "request"
    request.write_bytes(request_of(*FLOODS[name](), "X-Request-Timeout-Ms: 1000"))
    patient = patient_of(server, VICTIM)
    with connected(server, VICTIM) as client:
        quiet = measured(client)
        flood = flooding(str(request), server.address, 4, SECONDS + 1, 1e9)
        time.sleep(1)
        busy = measured(client)
        sent = sent_by(flood)
        wait_until(lambda: under_way(client) == 0, 60)
    patient.check(growth=GROWTH)
    record_property("said", f"quiet: {shown(quiet)}\n  flood: {shown(busy)}\n  {sent}")
    assert sent.answers > 1
    for kind in quiet:
        usual, beside = (statistics.median(figures[kind]) for figures in (quiet, busy))
        assert beside <= max(MEDIAN, TIMES * usual), kind
        assert max(busy[kind]) <= LONGEST, kind


def test_slow_readers_hold_their_answers_and_a_piece(server, patient_of, record_property):
    fields = {"label_token_ids": [*range(128)], "return_label_logprobs": True}
    large = {"items": [[item % 500] for item in range(10_000)]} | fields
    body = request_of("/v1/score", large, "Content-Encoding: gzip")
    with connected(server, VICTIM) as client:
        under_way(client)  # its connection is one of the descriptors before
        patient = patient_of(server, VICTIM)
        readers = []
        for _ in range(READERS):
            reader = Connection(client, timeout=60)
            reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.send(body)
            readers.append(reader)
        answers = 0
        for reader in readers:
            head = reader.socket.recv(200, socket.MSG_PEEK | socket.MSG_WAITALL)
            assert head.startswith(b"HTTP/1.1 200")
            answers += int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        time.sleep(2)  # none reads: all that may be made ahead is made
        held = patient.grew()
        for reader in readers:
            reader.close()
        wait_until(lambda: under_way(client) == 0, 60)
        said = f"{READERS} slow readers: {held / MIB:.0f} MiB, {held / READERS / MIB:.1f} each"
        record_property("said", said)
        patient.check("slow readers", growth=GROWTH)
    assert held < answers + READERS * HELD, said
