"""Promise: the load generator tells answers, refusals, errors, losses and lateness apart, and the
fake backend agrees with its oracle."""

import asyncio
import json
import threading
import time
from functools import partial

import httpx
import numpy as np
import pytest

from gpuscore.commands.cli import main
from gpuscore.engine.engine import Engine
from gpuscore.measure.bundle import read_bundle
from gpuscore.measure.figures import Shot, failed
from gpuscore.measure.load import LOST, LoadGenerator
from gpuscore.types.request import ScoreRequest
from gpuscore.types.results import label_scores
from support import fake

LABELS = [11, 23]


@pytest.mark.parametrize(("max_tokens", "page_size"), [(4096, 16), (32, 4), (7, 3), (1, 1)])
def test_the_fake_backend_agrees_with_its_oracle(max_tokens, page_size):
    backend = fake.FakeBackend(max_tokens=max_tokens, page_size=page_size, num_pages=211)
    engine = Engine(backend)
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


async def serve(answer, connections, reader, writer):
    connections.add(asyncio.current_task())
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            _, _, after = head.lower().partition(b"content-length: ")
            length = int(after.split(b"\r\n")[0] or 0)
            reply = answer(await reader.readexactly(length))
            if reply is None:
                break
            writer.write(reply)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has left
    except asyncio.CancelledError:
        writer.transport.abort()  # what was not read yet is for nobody
        raise
    finally:
        writer.close()


@pytest.fixture
def answering():
    """A function that starts a server whose answers are made by a function of the request's
    body."""
    loops = []

    def start(answer):
        ready, addresses, connections = threading.Event(), [], set()

        async def run():
            server = await asyncio.start_server(partial(serve, answer, connections), "127.0.0.1", 0)
            addresses.append(server.sockets[0].getsockname())
            loops.append((asyncio.get_running_loop(), stop := asyncio.Event(), thread))
            ready.set()
            await stop.wait()
            await asyncio.sleep(0.01)  # what has connected is accepted: closing forgets it
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks & connections:  # those of asyncio, which accept, end
                    task.cancel()
                await asyncio.sleep(0.01)  # connections are closed in the loop's next turn
            server.close()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        ready.wait()
        return "http://{}:{}".format(*addresses[0])

    yield start
    for loop, stop, thread in loops:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def answer_of(status, body, *headers):
    head = "".join(f"{line}\r\n" for line in headers)
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def send(kind, url, bodies, patience=5.0):
    load = LoadGenerator(httpx.URL(f"{url}/x"), None, bodies, patience)
    return load.closed(4) if kind == "closed" else load.open(np.linspace(0, 0.2, len(bodies)))


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_every_end_of_a_request_is_told_apart(answering, kind):
    """Answers of every framing arrive whole; refused, failed and lost requests are counted."""
    bodies = [f"request {number}".encode() for number in range(40)]

    def answer(body):
        chunks = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        return {
            5: answer_of(200, b"last", "Connection: close"),
            6: b"HTTP/1.1 200 X\r\n" + chunks,
            7: b"HTTP/1.1 100 Continue\r\n\r\n" + answer_of(200, b"after"),
            11: answer_of(429, b"{}"),
            12: answer_of(500, b"{}"),
            14: None,
            15: b"no HTTP at all\r\n\r\n",
        }.get(bodies.index(body), answer_of(200, body))

    record = send(kind, answering(answer), bodies)
    other = {11: 429, 12: 500, 14: 0, 15: 0}
    assert record.status.tolist() == [other.get(number, 200) for number in range(40)]
    texts = {5: b"last", 6: b"abcde", 7: b"after"}
    for number, body in enumerate(bodies):
        if record.status[number] == 200:
            assert record.bodies[number] == texts.get(number, body)
    assert failed(record) == 12
    assert "closed" in record.lost_because or "no valid HTTP" in record.lost_because
    shot = Shot.of(record, range(40))
    assert (shot.requests, shot.refused) == (36, 1)
    assert shot.items == sum(range(40)) - sum(other)
    assert len(shot.latencies) == 36


def test_latency_counts_from_the_scheduled_arrival(answering, monkeypatch):
    """A server answers one request after the other, 20 ms each, while one is due every 10 ms."""
    monkeypatch.setattr("gpuscore.measure.load.MOST_CONNECTIONS", 1)

    def answer(body):
        threading.Event().wait(0.02)  # blocks the server's event loop
        return answer_of(200, b"{}")

    load = LoadGenerator(httpx.URL(answering(answer)), None, [b"{}"] * 20, 5.0)
    record = load.open(np.arange(20) / 100)
    assert record.latency[-1] >= 20 * 0.02 - 19 * 0.01 - 0.005
    assert Shot.of(record, [1] * 20).late > 100, "the client's own delay is told"


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_a_server_that_falls_silent_is_given_up(answering, kind):
    held = threading.Event()

    def answer(body):
        if body == b"9":
            held.wait(5)
        return answer_of(200, body)

    bodies = [str(number).encode() for number in range(20)]
    record = send(kind, answering(answer), bodies, 0.6)
    held.set()
    assert record.lost_because == "no answer within 0.6 s"
    assert record.status[9] == LOST
    assert 0 < (record.status == 200).sum() < 20
    assert failed(record) is not None


def test_nobody_listens():
    record = send("closed", "http://127.0.0.1:9", [b"{}"] * 3)
    assert (record.status == LOST).all()
    assert "9" in record.lost_because
    assert failed(record) == 0


def scores(body):
    """Return an answer that takes 4 ms of the only processor, whose scores are the items' own."""
    time.sleep(0.004)
    asked = json.loads(body or "{}")
    if "items" not in asked:
        return answer_of(404, b"{}")
    items, labels = asked["items"], asked["label_token_ids"]
    rows = [[(sum(item) % 97 + 1) / (label + 200) for label in labels] for item in items]
    return answer_of(200, json.dumps({"scores": rows}).encode())


@pytest.mark.parametrize(("limit", "found"), [(400, True), (1, False)])
def test_the_highest_rate_within_a_limit_is_found(answering, tmp_path, monkeypatch, limit, found):
    """A server of known latency answers 250 requests/s at most, none within 1 ms."""
    if not found:
        monkeypatch.setattr("gpuscore.measure.runner.FEWEST_ARRIVALS", 8)
    url, path = answering(scores), tmp_path / "found.json"
    words = ["--scenario", "poisson,latency", "--find-rate", str(limit), "--minutes", "0.001"]
    asked = ["bench", "--url", url, *words, "--scale", "0.05", "--output", str(path)]
    assert main(asked) == 1, "it has no /v1/completions"
    poisson, scoring, decode = read_bundle(path).rows
    assert scoring.percentile(0) >= 4
    assert "status 404" in decode.error
    if not found:
        assert "has a p99 of at most 1 ms" in poisson.error
        return
    rate = float(poisson.way.removeprefix("highest with p99 <= 400 ms: ").removesuffix("/s"))
    assert 20 < rate < 500  # in the short time of a test a queue that grows may hold the limit
    assert poisson.percentile(99) <= 400
    assert poisson.requests_per_second < 250
