"""Promise: a body costs memory by its bytes, however its lists multiply, and delays no probe.

Each route gets its largest products: items, labels, documents, positions. Before limits were looked
at first, 4 MB of nulls took 500 MB, and 90 KB of ids 300 MB.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.connections import connected
from support.floods import probe
from support.serving import children, serving, wait_until
from support.vitals import GROWTH, MIB

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

TIMES, BESIDE = 30, 64 * MIB  # of the unpacked body, and beside it
LATE, FACTOR = 0.1, 10  # seconds of a probe, or so many times what it takes without a request
LONG, LONGEST = 4 * MIB, 16 * MIB - 1  # bytes of bodies with one long list
SCORE, RERANK, CLASSIFY, COMPLETIONS = "/v1/score", "/rerank", "/v1/classify", "/v1/completions"


@dataclass(frozen=True)
class Product:
    """Bodies of two factors, such as items and labels; `first` and `second` are the largest."""

    path: str
    name: str
    first: int
    second: int
    body: Callable[[int, int], bytes]


def product(path, name, first, second, fields):
    return Product(path, name, first, second, lambda n, m: json.dumps(fields(n, m)).encode())


def a_list(path, name, start, entry, end, size=LONG):
    """Return a body that is one long list of equal entries, which no second factor multiplies."""
    count = (size - len(start + end)) // (len(entry) + 1)
    return Product(
        path, name, count, 1, lambda n, _: f"{start}{','.join([entry] * n)}{end}".encode()
    )


def ids(count, start=0):
    return [(start + 7 * n) % 499 for n in range(count)]


def pairs(count):
    """Return different items of two ids."""
    return [[n % 499, n // 499] for n in range(count)]


def numbers(count):
    return [str(n) for n in range(count)]


NULL, ONE = {"on_error": "null"}, {"label_token_ids": [1]}
THOUSAND = f"[{','.join('1' * 1000)}]"  # ids
ONE_LABEL = '],"label_token_ids":[1]}'
ITEM = '{"items":[[1]],'
ECHO, ECHOED = '{"max_tokens":0,"echo":true,', {"max_tokens": 0, "echo": True}
DOCUMENTS = '{"query":"a","documents":['
PRODUCTS = (
    product(
        *(SCORE, "items x lists of labels", 10_000, 128),
        lambda n, m: {"items": pairs(n), "label_token_ids": [[*range(m)]] * n},
    ),
    product(
        *(SCORE, "items x tokens of labels", 10_000, 32),
        lambda n, m: {"items": pairs(n), "label_sequences": [ids(m, k) for k in range(128)]},
    ),
    product(
        *(SCORE, "items before a query of ids", 10_000, 4_000),
        lambda n, m: {"items": pairs(n), "query": ids(m), "item_first": True} | ONE | NULL,
    ),
    product(
        *(SCORE, "items after a query that is too long", 10_000, 6_000),
        lambda n, m: {"query": "a " * m, "items": numbers(n), "labels": ["a"]} | NULL,
    ),
    a_list(SCORE, "nulls", '{"on_error":"null","items":[', "null", ONE_LABEL, LONGEST),
    a_list(SCORE, "items", '{"items":[', "[]", ONE_LABEL, LONGEST),
    a_list(SCORE, "ids", '{"item_first":true,"items":[', THOUSAND, ONE_LABEL, LONGEST),
    a_list(SCORE, "lists of label ids", f'{ITEM}"label_token_ids":[', THOUSAND, "]}"),
    a_list(SCORE, "label sequences", f'{ITEM}"label_sequences":[', "[1]", "]}"),
    a_list(SCORE, "a query", f'{ITEM}"label_token_ids":[1],"query":[', "1", "]}"),
    product(
        *(RERANK, "documents x fields", 9_000, 30_000),
        lambda n, m: {"query": "a", "documents": [{}] * n, "rank_fields": numbers(m)} | NULL,
    ),
    product(
        *(RERANK, "documents after a query", 500, 3_000),
        lambda n, m: {"query": "a " * m, "documents": numbers(n), "return_documents": True},
    ),
    a_list(RERANK, "documents", DOCUMENTS, "{}", "]}", LONGEST),
    a_list(RERANK, "nested documents", DOCUMENTS, '{"a":{"a":{}}}', "]}"),
    a_list(RERANK, "a document of lists", DOCUMENTS + '{"a":[', "[[[[[]]]]]", "]}]}"),
    a_list(RERANK, "texts", '{"query":"a","texts":[', '""', "]}"),
    product(
        *(CLASSIFY, "texts x labels", 10_000, 26),
        lambda n, m: {"input": numbers(n), "labels": [chr(97 + k) for k in range(m)]},
    ),
    product(
        *(COMPLETIONS, "positions x logprobs", 60, 20),
        lambda n, m: {"prompt": [ids(400, k) for k in range(n)], "logprobs": m} | ECHOED,
    ),
    a_list(COMPLETIONS, "prompts", f'{ECHO}"prompt":[', "[1]", "]}"),
    a_list(COMPLETIONS, "ids", f'{ECHO}"prompt":[', THOUSAND, "]}", LONGEST),
    a_list(COMPLETIONS, "a field again", "{", '"n":1', "}"),
    a_list("/tokenize", "a text", '{"return_token_strs":true,"prompt":"', "a", '"}'),
    a_list("/detokenize", "tokens", '{"tokens":[', "1", "]}"),
)


class Peak:
    """The most memory that a server and its engine take, each above a level of its own.

    An engine's level is the most that it had before: its largest batch, which was measured at
    start.
    """

    def __init__(self, server):
        self._pids = (server.process.pid, *children(server.process.pid))
        self._engines = [_memory(pid, "VmHWM") for pid in self._pids[1:]]
        self.rest = self.resident

    def reset(self):
        self.rest = min(self.rest, self.resident)  # the first requests' memory may be back by now
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM becomes VmRSS

    @property
    def resident(self):
        return _memory(self._pids[0], "VmRSS")

    def growth(self):
        """Return the bytes since `reset`."""
        own = _memory(self._pids[0], "VmHWM") - self.rest
        engines = zip(self._pids[1:], self._engines, strict=True)
        return own + sum(max(0, _memory(pid, "VmHWM") - most) for pid, most in engines)


def _memory(pid, name):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


@pytest.fixture(scope="module")
def served():
    with (
        serving("demo", "--threads", "1", "--no-log-requests", fork=False) as server,
        connected(server) as http,
    ):
        http.timeout = 300
        for made in PRODUCTS:
            if made.name in ("items x lists of labels", "texts"):  # the largest batches
                post(http, made.path, made.body(made.first, made.second))
        yield server, http, Peak(server)


def post(http, path, body):
    """Return the status of the answer."""
    reply = http.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400), reply.text
    return reply.status_code


@pytest.fixture(scope="module")
def usual(served):
    """Seconds of the slowest probe without a request."""
    end = time.monotonic() + 2
    return late(served[0].address, lambda: time.monotonic() < end)


def late(address, busy):
    """Return the seconds of the slowest probe while `busy` is true, and of one at least."""
    slowest = probe(address)
    while busy():
        time.sleep(0.02)
        slowest = max(slowest, probe(address))
    return slowest


@pytest.mark.parametrize("made", PRODUCTS, ids=lambda made: f"{made.path} {made.name}")
def test_a_body_costs_its_bytes_and_delays_no_probe(served, usual, record_property, made):
    server, http, peak = served
    with suppress(TimeoutError):  # what is left of the request before counts, too
        wait_until(lambda: peak.resident <= peak.rest + GROWTH, seconds=10)
    body = made.body(made.first, made.second)
    peak.reset()
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(post, http, made.path, body)
        slowest = late(server.address, lambda: not sent.done())
        status, most = sent.result(), peak.growth()
    said = f"{len(body) / MIB:.2f} MiB took {most / MIB:.0f} MiB, {status}; a probe {slowest:.3f} s"
    record_property("said", f"{made.path} {made.name}: {said}")
    assert most <= TIMES * len(body) + BESIDE, said
    assert slowest <= max(LATE, FACTOR * usual), said
