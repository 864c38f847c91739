"""Promise: no text of one key, however long, delays the texts of another, and its memory is freed.

Each attack lasts `SECONDS`, after the same time without one. pytest -s prints the figures.
"""

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from support.connections import Connection, connected
from support.serving import RunningServer, serving
from support.vitals import Patient

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

ATTACKER, VICTIM = "key-of-the-attacker", "key-of-the-victim"
SECONDS = float(os.environ.get("FLOOD_SECONDS", "6"))
AT_ONCE = 4
SIZE = 16_000_000  # bytes of a text; a body may have 16 MiB
PATIENCE = "X-Request-Timeout-Ms: 1000"
MEDIAN, TIMES = 0.2, 5  # seconds; or times as long as without the attack
LONGEST = 3.0  # seconds, for one of a handful of requests on a machine with other work

ENGLISH = "The quick brown fox jumps over the lazy dogs, and nobody knows who has told it to. "
LABELS = ["yes", "no"]


def text(piece: str) -> str:
    return piece * (SIZE // len(piece.encode()))


def one_item(piece: str) -> tuple[str, object]:
    return "/v1/score", {"query": "", "items": [text(piece)], "labels": LABELS}


ATTACKS = {
    "one item of English": lambda: one_item(ENGLISH),
    "no place to cut: letters": lambda: one_item("a"),
    "no place to cut: spaces": lambda: one_item(" "),
    "no place to cut: combining marks": lambda: one_item("\u0301"),
    "no place to cut: emoji": lambda: one_item("\U0001f468\u200d\U0001f469"),
    "10,000 items": lambda: (
        "/v1/score",
        {"query": "q", "items": [f"{i} {ENGLISH * 19}" for i in range(10_000)], "labels": LABELS},
    ),
    "10,000 items, the query is long": lambda: (
        "/v1/score",
        {"query": ENGLISH * 20, "items": [f"{i}" for i in range(10_000)], "labels": LABELS},
    ),
    "a long query": lambda: (
        "/v1/score",
        {"query": text(ENGLISH), "items": ["a"] * 100, "labels": LABELS},
    ),
    "long labels": lambda: (
        "/v1/score",
        {"query": "q", "items": ["a"], "labels": [text(ENGLISH)[: SIZE // 128]] * 128},
    ),
    "tokenize": lambda: ("/tokenize", {"prompt": text(ENGLISH)}),
    "tokenize letters": lambda: ("/tokenize", {"prompt": text("a")}),
    "completions": lambda: ("/v1/completions", {"prompt": text(ENGLISH), "max_tokens": 1}),
    "rerank": lambda: ("/v1/rerank", {"query": "q", "documents": [text(ENGLISH)]}),
    "rerank, to be cut": lambda: (
        "/v1/rerank",
        {"query": "q", "documents": [text(ENGLISH)], "max_tokens_per_doc": 100},
    ),
    "rerank letters, to be cut": lambda: (
        "/v1/rerank",
        {"query": "q", "documents": [text("a")], "max_tokens_per_doc": 100},
    ),
    "rerank a long query": lambda: ("/v1/rerank", {"query": text(ENGLISH), "documents": ["d"]}),
}
TINY = {
    "score": (
        "/v1/score",
        {"query": "query: a lamp\nitem: ", "items": ["A lamp."], "labels": LABELS},
    ),
    "rerank": ("/v1/rerank", {"query": "a lamp", "documents": ["A lamp.", "A chair."]}),
    "tokenize": ("/tokenize", {"prompt": "A red steel lamp."}),
}


@dataclass
class Figures:
    """Seconds of the victim's requests by kind, `/health` included, and the attacker's statuses."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)

    def p99(self, kind: str) -> float:
        ordered = sorted(self.seconds[kind])
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]

    def __str__(self) -> str:
        shown = [
            f"{kind} {1e3 * statistics.median(all):.0f}/{1e3 * self.p99(kind):.0f}/"
            f"{1e3 * max(all):.0f} ms of {len(all)}"
            for kind, all in self.seconds.items()
        ]
        return ", ".join(shown) + (f"; attacker: {self.statuses}" if self.statuses else "")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{ATTACKER}\n{VICTIM}\n")
    with serving("demo", "--threads", "1", "--api-key-file", str(keys), fork=False) as running:
        yield running


def measured(client: httpx.Client, seconds: float) -> Figures:
    """Send the victim's requests one after another, about ten a second, and return the figures."""
    figures, end = Figures(), time.monotonic() + seconds
    while time.monotonic() < end:
        for kind, (path, body) in TINY.items():
            timed(figures, kind, lambda path=path, body=body: client.post(path, json=body))
        timed(figures, "health", lambda: client.get("/health"))
        time.sleep(0.02)
    return figures


def timed(figures: Figures, kind: str, ask) -> None:
    start = time.monotonic()
    answer = ask()
    figures.seconds.setdefault(kind, []).append(time.monotonic() - start)
    assert answer.status_code == 200, answer.text


def attack(client: httpx.Client, path: str, body: bytes, stop: threading.Event, seen) -> None:
    while not stop.is_set():
        with Connection(client, timeout=60) as connection:
            connection.request("POST", path, PATIENCE, body=body)
            status = connection.reply().status
        seen[status] = seen.get(status, 0) + 1


def canary(client: httpx.Client) -> str:
    path, body = TINY["score"]
    answer = client.post(path, json=body | {"query": ""})
    assert answer.status_code == 200, answer.text
    return answer.text.split('"scores":')[1].split("]]")[0]


@pytest.mark.parametrize("name", ATTACKS)
def test_another_key_does_not_notice(server, name):
    path, content = ATTACKS[name]()
    body = json.dumps(content, ensure_ascii=False).encode()
    with connected(server, ATTACKER) as attacker, connected(server, VICTIM) as victim:
        measured(victim, 0.5)  # the first texts start threads and allocate memory that stays
        patient = Patient(server.process.pid, lambda: canary(victim))
        quiet = measured(victim, SECONDS)
        stop, seen = threading.Event(), {}
        threads = [
            threading.Thread(target=attack, args=(attacker, path, body, stop, seen))
            for _ in range(AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        busy = measured(victim, SECONDS)
        stop.set()
        for thread in threads:
            thread.join()
    busy.statuses = seen
    print(f"\n{name}, {len(body)} bytes\n  quiet: {quiet}\n  attack: {busy}")
    grown = patient.grew()
    start = time.monotonic()
    with connected(server, VICTIM) as victim:
        patient.check(name, lambda: canary(victim))
    print(f"  RSS at the end +{grown >> 20} MiB, as before after {time.monotonic() - start:.1f} s")
    for kind in TINY:
        usual, under_attack = map(statistics.median, (quiet.seconds[kind], busy.seconds[kind]))
        assert under_attack <= max(MEDIAN, TIMES * usual), kind
        assert max(busy.seconds[kind]) <= LONGEST, kind
