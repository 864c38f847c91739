"""Promise: the load bench notices wrong scores, errors, lost answers and lateness, and loads only
this machine."""

import asyncio
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from gpuscore.config import EngineConfig
from gpuscore.engine.engine import Engine
from gpuscore.types.labels import label_scores
from gpuscore.types.request import ScoreRequest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import fake
from load import ClosedLoop, OpenLoop
from traffic import LABELS, Shape, check, make, summary

SHAPE = Shape(23, 3, 5)


@pytest.mark.parametrize(("max_tokens", "page_size"), [(4096, 16), (32, 4), (7, 3), (1, 1)])
def test_the_fake_backend_agrees_with_its_oracle(max_tokens, page_size):
    backend = fake.FakeBackend(max_tokens=max_tokens, page_size=page_size, num_pages=211)
    engine = Engine(backend, EngineConfig())
    rng = np.random.default_rng(1)
    queries = rng.integers(0, fake.VOCAB, (6, 23), dtype=np.int32)
    items = rng.integers(0, fake.VOCAB, (6, 3, 11), dtype=np.int32)
    labels = (np.array(LABELS, dtype=np.int32),) * 3
    futures = [
        engine.score(ScoreRequest(query, tuple(some), labels, need_lse=True))
        for query, some in zip(queries, items, strict=True)
    ]
    got = [label_scores(f.result(timeout=20), apply_softmax=False) for f in futures]
    engine.close()
    np.testing.assert_allclose(got, fake.oracle(queries, items, LABELS), rtol=1e-12)


def test_every_token_and_place_changes_the_fake_scores():
    rng = np.random.default_rng(2)
    query = rng.integers(0, fake.VOCAB, (1, 9), dtype=np.int32)
    items = rng.integers(0, fake.VOCAB, (1, 1, 4), dtype=np.int32)
    prompt = np.concatenate((query[0], items[0, 0]))
    seen = {tuple(fake.oracle(query, items, LABELS).ravel())}
    for place in range(len(prompt) - 1):
        other = prompt.copy()
        other[[place, place + 1]] = other[[place + 1, place]]
        seen.add(tuple(fake.oracle(other[None, :9], other[None, None, 9:], LABELS).ravel()))
    assert len(seen) == len(prompt)


@pytest.fixture
def answering():
    """A function that starts a server whose answers are made by a function of the request's
    body."""
    loops = []

    def start(answer):
        ready, found = threading.Event(), []

        async def serve(reader, writer):
            while True:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    break
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                reply = answer(await reader.readexactly(length))
                if reply is None:
                    break
                writer.write(reply)
            writer.close()

        async def run():
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            found.append(server.sockets[0].getsockname())
            loops.append((asyncio.get_running_loop(), stop := asyncio.Event(), thread))
            ready.set()
            await stop.wait()
            server.close()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        ready.wait()
        return found[0]

    yield start
    for loop, stop, thread in loops:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def reply(status, body):
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def scores(rows):
    text = str(rows.tolist()).encode()
    cached = SHAPE.own_cached
    return b'{"scores":%s,"usage":{"prompt_tokens_details":{"cached_tokens":%d}}}' % (text, cached)


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_right_wrong_refused_failed_and_lost_are_told_apart(answering, kind):
    traffic = make(SHAPE, 40, fake.VOCAB, fake.oracle, np.random.default_rng(3))
    number = {wire.split(b"\r\n\r\n")[1]: i for i, wire in enumerate(traffic.wires)}

    def answer(body):
        index = number[body]
        right = traffic.expected[index]
        return {
            5: reply(200, scores(right * (1 + 1e-9))),
            6: reply(200, scores(right[:2])),
            7: reply(200, b'{"scores": []}'),
            8: reply(200, scores(traffic.expected[9])),
            11: reply(429, b"{}"),
            12: reply(500, b"{}"),
            13: reply(413, b"{}"),
            14: None,
        }.get(index, reply(200, scores(right)))

    address = answering(answer)
    if kind == "closed":
        run = ClosedLoop(address, traffic.wires, 10.0, 4)
    else:
        run = OpenLoop(address, traffic.wires, np.linspace(0, 0.2, 40), warmup=0.0)
    record = run.execute()
    wrong, hit_rate = check(traffic, record)
    assert np.flatnonzero(wrong).tolist() == [5, 6, 7, 8]
    assert hit_rate == 0
    found = summary(traffic, record)
    names = ("requests", "wrong", "refused", "5xx", "other", "lost")
    assert [found[name] for name in names] == [40, 4, 1, 1, 1, 1]


def test_latency_counts_from_the_scheduled_arrival(answering):
    """A server answers one request after the other, 20 ms each, while one is due every 10 ms."""
    traffic = make(SHAPE, 20, fake.VOCAB, fake.oracle, np.random.default_rng(4))
    number = {wire.split(b"\r\n\r\n")[1]: i for i, wire in enumerate(traffic.wires)}

    def answer(body):
        threading.Event().wait(0.02)  # blocks the server's event loop
        return reply(200, scores(traffic.expected[number[body]]))

    offsets = np.arange(20) / 100
    run = OpenLoop(answering(answer), traffic.wires, offsets, warmup=0.0, max_connections=1)
    latency = run.execute().latency
    assert latency[-1] >= 20 * 0.02 - 19 * 0.01 - 0.005


def test_load_goes_to_loopback_only():
    with pytest.raises(ValueError, match="loopback"):
        ClosedLoop(("192.0.2.1", 80), [], 1.0, 1)
