"""Promise: the two threads run one at a time, in an order that the seed decides."""

from contextlib import nullcontext

import pytest

from support.streams.turns import BACKEND, ENGINE, TurnExecutor, Turns


class Order:
    """Notes the handovers."""

    def __init__(self):
        self.seen = []

    def release(self, handover):
        self.seen.append(("release", handover[0]))

    def acquire(self, handover):
        self.seen.append(("acquire", handover[0]))


def steps(seed):
    """Return who ran, step by step, while the backend had two tasks."""
    turns, ran = Turns(seed), []
    executor = TurnExecutor(turns, Order(), nullcontext)

    def task(number):
        for _ in range(20):
            ran.append((turns.name, number))
            turns.pause()
        return number

    futures = [executor.submit(task, number) for number in (1, 2)]
    for _ in range(20):
        ran.append((turns.name, 0))
        turns.pause()
    assert [future.result() for future in futures] == [1, 2]
    executor.shutdown()
    return ran


def test_the_seed_decides():
    assert steps(3) == steps(3)
    assert len({tuple(steps(seed)) for seed in range(8)}) > 4


def test_tasks_run_in_order_on_their_own_thread():
    ran = steps(1)
    assert [number for name, number in ran if name == BACKEND] == [1] * 20 + [2] * 20
    assert {number for name, number in ran if name == ENGINE} == {0}
    changes = sum(before[0] != after[0] for before, after in zip(ran, ran[1:], strict=False))
    assert changes > 3


def test_an_error_reaches_the_caller():
    order = Order()
    executor = TurnExecutor(Turns(0), order, nullcontext)
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 / 0).result()
    executor.shutdown()
    assert order.seen == [
        ("release", "task"),
        ("acquire", "task"),
        ("release", "result"),
        ("acquire", "result"),
    ]


def test_a_shutdown_cancels_what_has_not_started():
    turns = Turns(0)
    executor = TurnExecutor(turns, Order(), nullcontext)
    turns._chances = [False] * 10
    future = executor.submit(lambda: None)
    executor.shutdown(cancel_futures=True)
    assert future.cancelled()
