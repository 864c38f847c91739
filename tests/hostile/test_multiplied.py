"""Promise: a body costs memory by its bytes, however its lists multiply, and delays no probe.

Each route gets its largest products: items, labels, documents, positions. Before limits were looked
at first, 4 MB of nulls took 500 MB, and 90 KB of ids 300 MB.
"""

import json
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from support.connections import connected
from support.floods import probe, slowest
from support.serving import children, serving
from support.vitals import MIB

pytestmark = [pytest.mark.hostile, pytest.mark.alone]

TIMES, BESIDE = 30, 64 * MIB  # of the unpacked body, and beside it
LATE, FACTOR = 0.1, 10  # seconds of a probe, or so many times what it takes without a request
LONG, LONGEST = 4 * MIB, 16 * MIB - 1  # bytes of bodies with one long list
SCORE, RERANK, CLASSIFY, COMPLETIONS = "/v1/score", "/rerank", "/v1/classify", "/v1/completions"


def a_list(start, entry, end, size=LONG):
    """Return a body that is one long list of equal entries."""
    count = (size - len(start + end)) // (len(entry) + 1)
    return f"{start}{','.join([entry] * count)}{end}".encode()


def fields(**named):
    return json.dumps(named).encode()


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
LISTS = "items x lists of labels"
BODIES = {  # name -> the route, and what makes the body; as large as the limits allow, or larger
    LISTS: (
        SCORE,
        lambda: fields(items=pairs(10_000), label_token_ids=[[*range(128)]] * 10_000),
    ),
    "items x tokens of labels": (
        SCORE,
        lambda: fields(items=pairs(10_000), label_sequences=[ids(32, k) for k in range(128)]),
    ),
    "items before a query of ids": (
        SCORE,
        lambda: fields(items=pairs(10_000), query=ids(4_000), item_first=True, **ONE, **NULL),
    ),
    "items after a query that is too long": (
        SCORE,
        lambda: fields(query="a " * 6_000, items=numbers(10_000), labels=["a"], **NULL),
    ),
    "nulls": (SCORE, lambda: a_list('{"on_error":"null","items":[', "null", ONE_LABEL, LONGEST)),
    "ids": (SCORE, lambda: a_list('{"item_first":true,"items":[', THOUSAND, ONE_LABEL, LONGEST)),
    "label sequences": (SCORE, lambda: a_list(f'{ITEM}"label_sequences":[', "[1]", "]}")),
    "documents x fields": (
        RERANK,
        lambda: fields(query="a", documents=[{}] * 9_000, rank_fields=numbers(30_000), **NULL),
    ),
    "nested documents": (RERANK, lambda: a_list(DOCUMENTS, '{"a":{"a":{}}}', "]}")),
    "texts": (RERANK, lambda: a_list('{"query":"a","texts":[', '""', "]}")),
    "texts x labels": (
        CLASSIFY,
        lambda: fields(input=numbers(10_000), labels=[chr(97 + k) for k in range(26)]),
    ),
    "positions x logprobs": (
        COMPLETIONS,
        lambda: fields(prompt=[ids(400, k) for k in range(60)], logprobs=20, **ECHOED),
    ),
    "prompts": (COMPLETIONS, lambda: a_list(f'{ECHO}"prompt":[', "[1]", "]}")),
    "a field again": (COMPLETIONS, lambda: a_list("{", '"n":1', "}")),
    "a text": ("/tokenize", lambda: a_list('{"return_token_strs":true,"prompt":"', "a", '"}')),
    "tokens": ("/detokenize", lambda: a_list('{"tokens":[', "1", "]}")),
}


def memory(pid, name):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


@pytest.fixture(scope="module")
def served():
    """Yield a server, its client, and the seconds of the slowest probe without a request."""
    with (
        serving("demo", "--threads", "1", "--no-log-requests", fork=False) as server,
        connected(server) as http,
    ):
        http.timeout = 300
        for path, body in (BODIES[LISTS], BODIES["texts"]):  # the largest batches
            post(http, path, body())
        end = time.monotonic() + 2
        yield server, http, slowest(partial(probe, server.address), lambda: time.monotonic() < end)


def post(http, path, body):
    """Return the status of the answer. To join 28 MB of it would hold up the probes' thread."""
    head = {"content-type": "application/json"}
    with http.stream("POST", path, content=body, headers=head) as reply:
        assert reply.status_code in (200, 400), reply.read()
        deque(reply.iter_raw(), maxlen=0)
    return reply.status_code


@pytest.mark.parametrize("name", BODIES)
def test_a_body_costs_its_bytes_and_delays_no_probe(served, record_property, name):
    server, http, usual = served
    path, make = BODIES[name]
    body, own = make(), server.process.pid
    engines = children(own)  # an engine's level is the most that it had: its largest batch
    Path(f"/proc/{own}/clear_refs").write_text("5")  # forget the most that it had
    before = memory(own, "VmRSS") + sum(memory(pid, "VmHWM") for pid in engines)
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(post, http, path, body)
        late = slowest(partial(probe, server.address), lambda: not sent.done())
        status, most = sent.result(), sum(memory(pid, "VmHWM") for pid in (own, *engines)) - before
    said = f"{len(body) / MIB:.2f} MiB took {most / MIB:.0f} MiB, {status}; a probe {late:.3f} s"
    record_property("said", f"{path} {name}: {said}")
    assert most <= TIMES * len(body) + BESIDE, said
    assert late <= max(LATE, FACTOR * usual), said
