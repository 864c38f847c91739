"""Promise: no round of the event loop is so long that a refusal or a probe has to wait for it."""

import asyncio
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from gpuscore.errors import Unavailable
from gpuscore.server.http.rounds import Rounds
from gpuscore.server.service import Bridge, Pacer
from gpuscore.types.batch import NO_TOKENS
from gpuscore.types.request import ScoreRequest

LABELS = (np.array([3], np.int32),)


def run_in(rounds, main):
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(rounds)) as runner:
        return runner.run(main())


def test_a_long_round_is_followed_by_more_work():
    rounds = Rounds()

    async def main():
        await asyncio.sleep(0)
        short, start = rounds.pieces(8), time.monotonic()
        time.sleep(0.15)  # as long as thousands of ready sockets would take
        assert time.monotonic() - rounds.began >= 0.15
        await asyncio.sleep(0)
        return short, rounds.pieces(8), time.monotonic() - start

    short, long, took = run_in(rounds, main)
    assert short == 8
    assert 30 <= long < took / 0.0015, "more would keep rounds long"


class Engine:
    """An engine that keeps its requests and answers them from a thread."""

    def __init__(self):
        self.calls, self.futures = [], []

    def score_all(self, requests):
        self.calls.append(len(requests))
        futures = [Future() for _ in requests]
        self.futures += futures
        for request, future in zip(requests, futures, strict=True):
            if request.priority:
                future.set_exception(Unavailable("the engine is not running"))
        return futures

    def answer_all(self):
        for number, future in enumerate(self.futures):
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_result(number)


def request(priority=0):
    return ScoreRequest(NO_TOKENS, (np.array([5], np.int32),), LABELS, True, priority=priority)


def test_requests_of_a_round_go_together_and_answers_come_in_portions():
    engine, rounds = Engine(), Rounds()

    async def main():
        bridge = Bridge(engine, Pacer(lambda: 16))
        tasks = [asyncio.create_task(bridge.score(request())) for _ in range(100)]
        refused = asyncio.create_task(bridge.score(request(priority=1)))
        left = asyncio.create_task(bridge.score(request()))
        while not engine.calls:
            await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(Unavailable):
            await refused
        threading.Thread(target=engine.answer_all).start()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert sum(task.done() for task in tasks) <= 48, "of three rounds"
        return await asyncio.gather(*tasks)

    assert run_in(rounds, main) == list(range(100))
    assert engine.calls == [102]
    assert engine.futures[101].cancelled()


def test_a_bug_of_the_engine_reaches_who_waits():
    class Broken:
        def score_all(self, requests):
            raise KeyError("a bug")

    async def main():
        await Bridge(Broken(), Pacer(lambda: 16)).score(request())

    with pytest.raises(KeyError):
        asyncio.run(main())
