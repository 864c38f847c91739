"""Promise: the engine drops cancelled requests, reports progress, refuses what does not fit, and
answers every request when it closes."""

import threading
import time
import traceback

import numpy as np
import pytest

from gpuscore.backends.base import DeviceLost
from gpuscore.engine.engine import Engine
from gpuscore.engine.runner import Runner
from gpuscore.errors import (
    InsufficientMemory,
    InternalError,
    Unavailable,
)
from gpuscore.types.request import ScoreRequest
from support.serving import wait_until
from support.tape_backend import TapeBackend


def request_of(num_items=1, query_len=3):
    ids = np.arange(query_len, dtype=np.int32)
    items = tuple(np.array([i % 900, 7], dtype=np.int32) for i in range(num_items))
    return ScoreRequest(ids, items, (np.array([1], dtype=np.int32),) * num_items, True)


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def make_engine(gate):
    made = []

    def make(**options):
        made.append(Engine(TapeBackend(gate=gate, **options)))
        return made[-1]

    yield make
    gate.set()
    for engine in made:
        engine.close()


def test_many_threads_each_get_their_own_answer(make_engine, gate):
    gate.set()
    engine = make_engine(max_tokens=16)
    futures = [engine.score(request_of(n)) for n in range(1, 40)]
    assert [len(f.result(timeout=30).label_logits) for f in futures] == list(range(1, 40))


def test_what_is_in_flight_is_counted(make_engine, gate):
    engine = make_engine()
    first, second = engine.score_all([request_of(), request_of()])
    assert (engine.stats().requests, engine.stats().tokens) == (2, 10)
    second.cancel()
    assert (engine.stats().requests, engine.stats().tokens) == (1, 5)
    gate.set()
    first.result(timeout=30)
    assert (engine.stats().requests, engine.stats().tokens) == (0, 0)


def test_cancelled_work_does_not_run(make_engine, gate):
    engine = make_engine(max_tokens=8)
    running = engine.score(request_of())
    waiting = engine.score(request_of(1000))
    wait_until(lambda: engine.stats().running)
    waiting.cancel()
    third = engine.score(request_of())
    gate.set()
    running.result(timeout=30)
    third.result(timeout=30)
    assert engine.stats().counters.batches < 10


def test_progress_counts_up(make_engine, gate):
    gate.set()
    engine = make_engine(max_tokens=8)
    seen = []
    engine.score(request_of(20), seen.append).result(timeout=30)
    assert seen == sorted(seen)
    assert seen[-1] == 20
    assert len(seen) > 3


def test_a_failing_callback_fails_its_own_request(make_engine, gate):
    gate.set()
    engine = make_engine()

    def fail(done):
        raise ZeroDivisionError

    with pytest.raises(InternalError) as failure:
        engine.score(request_of(), fail).result(timeout=30)
    engine.score(request_of()).result(timeout=30)
    frames = traceback.extract_tb(failure.value.__cause__.__traceback__)
    assert [frame.name for frame in frames] == ["fail"], "others would keep the engine in memory"


def test_what_can_never_run_is_refused(make_engine, gate):
    gate.set()
    engine = make_engine(num_pages=2, page_size=4)
    good, large = engine.score_all([request_of(), request_of(query_len=9)])
    with pytest.raises(InsufficientMemory, match="9 shared tokens"):
        large.result(timeout=30)
    good.result(timeout=30)


def test_closing_answers_what_waits(gate):
    backend = TapeBackend(gate=gate, max_tokens=8)
    engine = Engine(backend)
    futures = [engine.score(request_of(50)) for _ in range(3)]
    assert engine.alive
    threading.Timer(0.1, gate.set).start()
    engine.close()
    assert not engine.alive
    assert backend.closed
    for future in futures:
        with pytest.raises(Unavailable):
            future.result(timeout=0)
    with pytest.raises(Unavailable):
        engine.score(request_of()).result(timeout=0)


def test_a_dead_loop_tells_the_truth(make_engine, gate, monkeypatch):
    gate.set()
    engine = make_engine()

    def die(runner):
        raise RuntimeError("planted")

    monkeypatch.setattr(Runner, "step", die)
    waiting = engine.score(request_of())
    with pytest.raises(Unavailable):
        waiting.result(timeout=30)
    wait_until(lambda: not engine.alive)
    with pytest.raises(Unavailable):
        engine.score(request_of()).result(timeout=0)


def test_a_lost_device_ends_it(make_engine, gate):
    """Waiting requests get 503 and the process can be replaced; it does not answer 500 for ever."""
    gate.set()
    engine = make_engine(fault=lambda step: DeviceLost("gone") if step == 1 else None)
    engine.score(request_of()).result(timeout=30)
    with pytest.raises(Unavailable):
        engine.score(request_of()).result(timeout=30)
    wait_until(lambda: not engine.alive)
    with pytest.raises(Unavailable):
        engine.score(request_of()).result(timeout=0)


def test_timings(make_engine, gate):
    engine = make_engine()
    future = engine.score(request_of())
    time.sleep(0.05)
    gate.set()
    timings = future.result(timeout=30).timings
    assert timings.queue >= 0
    assert timings.batch >= 0
    assert timings.device >= 0.04
