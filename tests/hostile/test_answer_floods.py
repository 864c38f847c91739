"""Promise: large answers delay nobody, and a client that reads slowly holds its answer, which is
counted, and little more.

Each flood asks for large answers, then for small ones to the same prompts: `/health` and another
key's small request take at most FACTOR times as long beside the large ones. The floods and a client
that measures share the machine's cores with the server in both cases. pytest -s prints the figures.
"""

import gzip
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.connections import Connection, canary, connected, under_way
from support.floods import flooding, sent_by
from support.serving import RunningServer, serving, wait_until
from support.vitals import MIB

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

FLOODER, VICTIM = "key-of-the-flooder", "key-of-the-victim"
SECONDS = float(os.environ.get("FLOOD_SECONDS", "8"))
WARM = 3  # seconds until there are answers
WIDTH = 2  # connections of a flood
FACTOR = 3
ITEMS, LABELS = 10_000, 128
PROMPTS, TOKENS = 1_000, 30
TINY = {"query": "query: a lamp\nitem: ", "items": ["A lamp."], "labels": ["yes", "no"]}
# A slow reader may hold its answer of 53 MB, of which --max-queued-bytes counts what it can have at
# most, and pieces of it; Python numbers of it would be twice that.
READERS, HELD = 6, 20 * MIB


def items_of(labels: int, **fields: object) -> tuple[str, object]:
    items = [[item % 500] for item in range(ITEMS)]
    return "/v1/score", {"items": items, "label_token_ids": [*range(labels)], **fields}


def lists_of(labels: int) -> tuple[str, object]:
    lists = [[(item + label) % 500 for label in range(labels)] for item in range(ITEMS)]
    return "/v1/score", {"items": [[1]] * ITEMS, "label_token_ids": lists}


def prompts_of(**fields: object) -> tuple[str, object]:
    prompts = [[(index * 7 + place) % 500 for place in range(TOKENS)] for index in range(PROMPTS)]
    return "/v1/completions", {"prompt": prompts, **fields}


FLOODS = {  # name -> the request with a large answer, and the one with a small answer
    "log-probabilities": (items_of(LABELS, return_label_logprobs=True), items_of(1)),
    "echoes": (
        prompts_of(max_tokens=0, echo=True, logprobs=10),
        prompts_of(max_tokens=1),
    ),
    "label lists": (lists_of(LABELS), lists_of(1)),
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


def request_of(path: str, body: object, packed: bool = False) -> bytes:
    content = json.dumps(body).encode()
    content = gzip.compress(content) if packed else content
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {FLOODER}",
        "Content-Type: application/json",
        *(["Content-Encoding: gzip"] if packed else []),
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def timed(ask) -> float:
    start = time.monotonic()
    answer = ask()
    assert answer.status_code == 200, answer.text
    return time.monotonic() - start


class Figures:
    """Seconds of probes and of the victim's requests, and what the flood got."""

    def __init__(self) -> None:
        self.health: list[float] = []
        self.tiny: list[float] = []
        self.answers = self.received = 0

    def measure(self, server: RunningServer, client: httpx.Client, request: Path) -> None:
        flood = flooding(str(request), server.address, WIDTH, SECONDS + WARM, 1e9)
        time.sleep(WARM)
        end = time.monotonic() + SECONDS
        with ThreadPoolExecutor(1) as other:
            probes = other.submit(self._probe, server, end)
            while time.monotonic() < end:
                self.tiny.append(timed(lambda: client.post("/v1/score", json=TINY)))
        probes.result()
        sent = sent_by(flood)
        self.answers, self.received = self.answers + sent.answers, self.received + sent.received
        wait_until(lambda: under_way(client) == 0, 60)
        time.sleep(1)  # the engine ends its batch

    def _probe(self, server: RunningServer, end: float) -> None:
        with connected(server) as client:
            while time.monotonic() < end:
                self.health.append(timed(lambda: client.get("/health")))
                time.sleep(0.01)

    @property
    def p99(self) -> float:
        return sorted(self.health)[len(self.health) * 99 // 100]

    @property
    def median(self) -> float:
        return statistics.median(self.tiny)

    def __str__(self) -> str:
        return (
            f"/health 99 % within {1e3 * self.p99:.1f} ms, at most {1e3 * max(self.health):.1f} of "
            f"{len(self.health)}; one item {1e3 * self.median:.1f} ms (median of "
            f"{len(self.tiny)}); {self.answers} answers, {self.received / 1e6:.0f} MB"
        )


@pytest.mark.parametrize("name", FLOODS)
def test_large_answers_delay_nobody(server, tmp_path, record_property, name):
    large, small = (tmp_path / kind for kind in ("large", "small"))
    for path, asked in zip((large, small), FLOODS[name], strict=True):
        path.write_bytes(request_of(*asked))
    beside_large, beside_small = Figures(), Figures()
    with connected(server, VICTIM) as client:
        said = canary(client)
        for _ in range(2):  # in turns, because the machine's other work changes
            beside_small.measure(server, client, small)
            beside_large.measure(server, client, large)
        assert canary(client) == said
    said = f"{name}:\n  large: {beside_large}\n  small: {beside_small}"
    print("\n" + said)
    record_property("said", said)
    assert beside_large.received > 10 * beside_small.received / max(1, beside_small.answers)
    assert beside_large.p99 <= FACTOR * beside_small.p99
    assert beside_large.median <= FACTOR * beside_small.median


def test_slow_readers_hold_their_answers_and_a_piece(server, patient_of, record_property):
    body = request_of(*items_of(LABELS, return_label_logprobs=True), packed=True)
    with connected(server, VICTIM) as client:
        canary(client)  # its connection is one of the descriptors before
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
        print("\n" + said)
        record_property("said", said)
        # Python's own allocator keeps blocks in which one small object lives on.
        patient.check("slow readers", growth=HELD * 3)
    assert held < answers + READERS * HELD, said
