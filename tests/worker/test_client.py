"""Promise: an engine in a child process answers as one in this process; losing the child is noticed
at once and fails only the requests in flight."""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import (
    ConfigError,
    EngineFailed,
    InsufficientMemory,
    LoadTimeout,
    Unavailable,
)
from gpuscore.processes.worker import client as client_module
from gpuscore.processes.worker.client import EngineClient
from gpuscore.processes.worker.process import Patience, command
from gpuscore.processes.worker.wire import Placement, Start, encode
from gpuscore.types.request import ScoreRequest
from support import tape_engine as tape_child
from support.serving import children, running, wait_until
from support.tape_engine import MARK, MischievousTape

LABELS = np.array([3, 1, 500], dtype=np.int32)
# A lost child is forgiven at once, so that the tests can share one client.
PATIENCE = Patience(stopped=2.0, delay=0.2, forgiven=0.0)


def request_of(*tokens, items=1, query=3, labels=LABELS):
    """Return a request whose item i is i followed by these tokens."""
    rows = tuple(np.array([i % 800, *tokens], dtype=np.int32) for i in range(items))
    return ScoreRequest(np.arange(query, dtype=np.int32) % 800, rows, (labels,) * items, True)


def score(client, request):
    (future,) = client.score_all([request])
    return future


@pytest.fixture(scope="module")
def make_client(tmp_path_factory):
    """A factory of clients; children import the tape backend through PYTHONPATH."""
    made = []
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", path)
    patch.setenv("GPUSCORE_API_KEY", "secret")

    def make(factory="prepare", patience=PATIENCE, **config):
        start = Start("/nowhere", Placement("cpu", ModelConfig()), EngineConfig(**config))
        made.append(EngineClient(command(f"support.tape_engine:{factory}"), start, patience))
        return made[-1]

    yield make
    for client in made:
        client.close()
    patch.undo()


@pytest.fixture(scope="module")
def shared(make_client):
    return make_client(engine_timeout=2.0)


@pytest.fixture
def client(shared):
    wait_until(lambda: shared.alive)
    return shared


@pytest.fixture(scope="module")
def here():
    """The same engine, run in this process."""
    backend = tape_child.prepare(None, None).load()
    assert isinstance(backend, MischievousTape)
    engine = Engine(backend)
    yield engine
    engine.close()


def same(result, other):
    assert list(map(len, result.label_logits)) == list(map(len, other.label_logits))
    rows, expected = map(np.concatenate, (result.label_logits, other.label_logits))
    np.testing.assert_array_equal(rows, expected, strict=True)
    np.testing.assert_array_equal(result.lse, other.lse, strict=True)
    assert result.computed_tokens == other.computed_tokens


def test_it_answers_as_an_engine_in_this_process(client, here):
    assert client.started.result() == here.limits
    requests = [request_of(7, items=n, query=n % 5) for n in range(1, 30)]
    futures = [score(client, request) for request in requests]
    for request, future in zip(requests, futures, strict=True):
        same(future.result(timeout=30), here.score(request).result())


def test_a_small_request_that_is_alone_is_written_by_its_caller(client, monkeypatch):
    caller, by_caller = threading.get_ident(), []

    def noted(message):
        by_caller.append(threading.get_ident() == caller)
        return encode(message)

    monkeypatch.setattr(client_module, "encode", noted)

    def written(*requests):
        by_caller.clear()
        wait(client.score_all(requests), timeout=30)
        return by_caller[:]

    wait_until(lambda: written(request_of(7)) == [True])  # others may still be answered
    assert written(request_of(7, items=client_module.AT_ONCE + 1)) == [False]
    assert written(request_of(7), request_of(8)) == [False, False]


def test_errors_come_with_the_future(client):
    future = score(client, request_of(items=2, query=70_000))
    with pytest.raises(InsufficientMemory, match="70000 shared tokens"):
        future.result(timeout=30)


def test_cancelling_drops_work_that_is_not_launched(client):
    MARK.unlink(missing_ok=True)
    held = score(client, request_of(tape_child.HELD))
    wait_until(MARK.exists)
    waiting = client.score_all([request_of(items=100) for _ in range(49)])
    for future in waiting:
        future.cancel()
    last = score(client, request_of())
    wait_until(lambda: client.stats().requests == 2)  # while the batch still runs
    assert not held.done()
    MARK.unlink()
    last.result(timeout=30)
    wait_until(lambda: client.stats().requests == client.stats().pages_used == 0)


def test_it_knows_no_api_key_and_has_frozen_its_objects(client):
    assert b"secret" not in Path(f"/proc/{client.pid}/environ").read_bytes()
    frozen = score(client, request_of(tape_child.FROZEN)).result(timeout=30).label_logits[0][0]
    assert frozen > 1000


@pytest.mark.parametrize(
    "harm", ["CRASH", "DEAD_LOOP", "STUCK", "GARBAGE", "HALF_FRAME", "HUGE_FRAME"]
)
def test_a_lost_child(client, here, harm):
    """Any loss of the child is noticed: requests in flight fail, and a new child takes over."""
    pid, restarts = client.pid, client.restarts
    start = time.monotonic()
    futures = [score(client, request_of(items=5)) for _ in range(3)]
    futures.append(score(client, request_of(getattr(tape_child, harm))))
    assert not wait(futures, timeout=10).not_done
    assert time.monotonic() - start < {"STUCK": 4, "HALF_FRAME": 4}.get(harm, 2)
    with pytest.raises(Unavailable) as failure:
        futures[-1].result(timeout=0)
    assert failure.value.retry_after >= 1
    wait_until(lambda: not client.alive, seconds=1)
    with pytest.raises(Unavailable):
        score(client, request_of()).result(timeout=0)
    wait_until(lambda: client.alive)
    assert not running(pid)
    assert client.restarts == restarts + 1
    request = request_of(7, items=20)
    same(score(client, request).result(timeout=30), here.score(request).result())


def test_a_stopped_child(client):
    """The silence is noticed and fails the waiting requests; nothing blocks on the full pipe."""
    os.kill(client.pid, signal.SIGSTOP)
    large = request_of(items=1, query=100_000)
    futures = [score(client, large) for _ in range(20)]  # 8 MB; the pipe takes 0.2
    assert client.alive, "all of them are queued before anybody has noticed"
    wait_until(lambda: not client.alive, seconds=3)
    with pytest.raises(Unavailable):
        score(client, request_of()).result(timeout=0)
    for future in futures:
        with pytest.raises(Unavailable):
            future.result(timeout=5)
    wait_until(lambda: client.alive)


def test_a_short_stop_is_survived(client):
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    future = score(client, request_of())
    time.sleep(0.8)
    os.kill(pid, signal.SIGCONT)
    future.result(timeout=10)
    assert client.pid == pid


def test_a_stuck_batch_counts_also_when_its_client_has_left(client):
    restarts = client.restarts
    MARK.unlink(missing_ok=True)
    future = score(client, request_of(tape_child.STUCK))
    wait_until(MARK.exists)
    future.cancel()
    wait_until(lambda: client.restarts > restarts)


def test_a_long_batch_whose_layers_advance_is_no_stuck_one(client, here):
    """It takes longer than engine_timeout."""
    pid, request = client.pid, request_of(tape_child.MANY_LAYERS)
    same(score(client, request).result(timeout=30), here.score(request).result())
    assert client.pid == pid


def test_it_is_given_up(make_client):
    patience = Patience(delay=0.05, max_failures=3)
    client = make_client(patience=patience)
    for _ in range(3):
        wait_until(lambda: client.alive)
        with pytest.raises(Unavailable):
            score(client, request_of(tape_child.CRASH)).result(timeout=10)
    wait_until(client.ended.done)
    with pytest.raises(EngineFailed, match="failed 3 times in a row, last: exit code 9"):
        client.ended.result()
    assert not client.alive
    with pytest.raises(Unavailable):
        score(client, request_of()).result(timeout=0)


def test_a_refused_model(make_client):
    client = make_client("refuse")
    for waits in (client.started.result, client.ended.result):
        with pytest.raises(ConfigError, match="^/nowhere is refused$"):
            waits()


@pytest.mark.parametrize(("factory", "seconds"), [("slow_load", 4), ("hanging_import", 1.5)])
def test_a_load_that_hangs(make_client, factory, seconds):
    client = make_client(factory, load_timeout=seconds)
    start = time.monotonic()
    with pytest.raises(LoadTimeout, match=f"did not load.* within --load-timeout {seconds} s: "):
        client.started.result()
    assert seconds - 0.1 < time.monotonic() - start < seconds + 2.5
    with pytest.raises(LoadTimeout):
        client.ended.result()
    assert not running(client.pid)


def test_a_later_load_that_hangs_is_a_loss(make_client, tmp_path, monkeypatch):
    """The first child was ready, so a later one that hangs is restarted like any lost child."""
    monkeypatch.setenv("TAPE_MARK", str(tmp_path / "mark"))
    patience = Patience(delay=0.05, max_failures=2)
    client = make_client("slow_second_load", patience, load_timeout=4)
    client.started.result()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="2 times in a row, last: the engine did not load") as e:
        client.ended.result()
    assert not isinstance(e.value, LoadTimeout)
    assert client.restarts == 1


def test_closing_while_loading_does_not_wait(make_client):
    client = make_client("slow_load")
    wait_until(lambda: client.pid is not None)
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < 5
    assert not running(client.pid)
    with pytest.raises(EngineFailed, match="closed"):
        client.started.result()


def test_closing_answers_what_waits(make_client):
    client = make_client()
    client.started.result()
    futures = [score(client, request_of(tape_child.STUCK)) for _ in range(3)]
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < 5
    for future in futures:
        with pytest.raises(Unavailable):
            future.result(timeout=0)
    client.ended.result()
    assert not running(client.pid)


def test_signals_during_its_start_do_not_end_a_child(make_client):
    """A closing terminal signals it from the moment when it exists."""
    before = set(children(os.getpid()))
    started = threading.Event()

    def signal_all():
        while not started.is_set():
            for pid in set(children(os.getpid())) - before:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    os.kill(pid, number)
            time.sleep(0.001)

    thread = threading.Thread(target=signal_all)
    thread.start()
    try:
        client = make_client()
        client.started.result(60)
    finally:
        started.set()
        thread.join()
    assert score(client, request_of(5)).result(10)


def test_a_program_that_is_no_child(make_client):
    """Whatever the command does, the result is an error and not a wait."""
    patience = Patience()
    start = Start("/nowhere", Placement("cpu", ModelConfig()), EngineConfig())
    for program, reason in (["/nonexistent/program"], "cannot be started"), (["false"], "code 1"):
        client = EngineClient(program, start, patience)
        with pytest.raises(EngineFailed, match=reason):
            client.started.result()
        client.close()


def test_a_worker_without_its_parent_ends():
    done = subprocess.run([*command(), "0", "1"], timeout=30, check=False)
    assert done.returncode == 1
