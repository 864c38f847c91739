"""Promise: a server of two replicas answers as one of one does, also while a replica is lost."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from gpuscore import Scorer
from gpuscore.commands.cli import main
from support.connections import connected
from support.serving import SMALL, children, serving, wait_until
from support.watched_server import samples_of

TWO = ("--devices", "cpu,cpu", "--kv-cache-size", "64MiB")
QUERIES = [f"query: a blue chair, number {n}\nitem: " for n in range(12)]
ITEMS = ["a chair in blue", "a red lamp", "a wool scarf"]


@pytest.fixture(scope="module")
def server():
    with serving("demo", *TWO, *SMALL, engines=4) as started:
        yield started


def ask(client, query):
    body = {"query": query, "items": ITEMS, "labels": ["yes", "no"], "apply_softmax": True}
    return client.post("/v1/score", json=body, timeout=60)


@pytest.fixture(scope="module")
def expected():
    with Scorer("demo", max_batch_tokens=64, threads=1) as scorer:
        return {
            query: scorer.score(query, ITEMS, labels=["yes", "no"], apply_softmax=True).scores
            for query in QUERIES
        }


def alive(client):
    samples = samples_of(client)
    up = samples["gpuscore_replica_up", ()]
    return up + samples["gpuscore_replica_up", (("replica", "1"),)]


def restarts(client):
    samples = samples_of(client)
    both = ((), (("replica", "1"),))
    return sum(samples["gpuscore_engine_restarts_total", labels] for labels in both)


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_all_requests_are_answered_while_a_replica_is_lost(server, expected, harm):
    """A stopped one is taken for lost after 5 s; what it had is run again then."""
    with connected(server) as client:
        before = restarts(client)
        wait_until(lambda: alive(client) == 2)
        victim = children(server.process.pid)[0]
        end = time.monotonic() + 2

        def one_client(number):
            answers = []
            with httpx.Client(base_url=server.url) as own:
                while time.monotonic() < end:
                    query = QUERIES[(number + len(answers)) % len(QUERIES)]
                    answers.append((query, ask(own, query), own.get("/health").status_code))
                    time.sleep(0.1)  # leaves the cores to the other tests
            return answers

        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(one_client, number) for number in range(6)]
            time.sleep(0.5)
            os.kill(victim, harm)
            wait_until(lambda: alive(client) == 1, seconds=10)
            answers = [answer for future in running for answer in future.result()]
        assert len(answers) > 12
        for query, reply, health in answers:
            assert reply.status_code == 200, reply.text
            assert health == 200
            for row, wanted in zip(reply.json()["scores"], expected[query], strict=True):
                assert row == pytest.approx(wanted.tolist(), abs=1e-5)
        wait_until(lambda: alive(client) == 2, seconds=60)
        assert victim not in children(server.process.pid)
        assert restarts(client) == before + 1


def test_one_process_of_each_replica_and_none_is_left(server):
    assert len(children(server.process.pid)) == 2
    with connected(server) as client:
        names = {
            sample.split("{")[0]
            for sample in client.get("/metrics").text.splitlines()
            if 'replica="1"' in sample
        }
    assert {"gpuscore_kv_pages", "gpuscore_batches_total", "gpuscore_replica_info"} <= names


def test_info_names_the_replicas(capsys):
    assert main(["info", "demo", *TWO]) == 0
    shown = capsys.readouterr().out
    cores = sorted(os.sched_getaffinity(0))
    assert f"replicas                            2 on cpu (cores {cores[0]}" in shown
    assert "64.0 MiB" in shown
