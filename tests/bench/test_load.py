"""Promise: the load generator tells answers, refusals, errors, losses and lateness apart."""

import threading

import httpx
import numpy as np
import pytest

from gpuscore.commands.cli import main
from gpuscore.measure.bundle import read_bundle
from gpuscore.measure.figures import Shot, failed
from gpuscore.measure.load import LOST, LoadGenerator
from support.known_answers import answer_of, scores


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


@pytest.mark.parametrize(("limit", "found"), [(400, True), (1, False)])
def test_the_highest_rate_within_a_limit_is_found(answering, tmp_path, monkeypatch, limit, found):
    """A server of known latency answers 250 requests/s at most, none within 1 ms."""
    monkeypatch.setattr("gpuscore.measure.runner.FEWEST_ARRIVALS", 20 if found else 3)
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
