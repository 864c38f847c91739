"""Promise: a lost replica costs nobody an answer; the server ends when none can be kept. Engines of
several models outlive each other's losses."""

import os
import signal
import time
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.config.served import ServedConfig
from gpuscore.errors import ConfigError, EngineFailed, Unavailable
from gpuscore.processes.replicas.replicas import start_models
from gpuscore.processes.worker.process import Patience
from gpuscore.types.request import ScoreRequest
from support import tape_engine as tape_child
from support.serving import running, wait_until
from support.tape_backend import tape_logit
from support.tape_engine import MARK

LABELS = np.array([3, 1, 500], dtype=np.int32)
MODEL = ModelConfig(kv_cache_size=2**20)
PATIENCE = Patience(stopped=4.0, delay=0.3, forgiven=0.0)


def request_of(*tokens, items=1, query=3):
    rows = tuple(np.array([i % 800, i // 800, *tokens], dtype=np.int32) for i in range(items))
    return ScoreRequest(np.arange(query, dtype=np.int32) % 800, rows, (LABELS,) * items, True)


def check(request, result):
    for item, logits in zip(request.item_ids, result.label_logits, strict=True):
        prompt = [*request.query_ids.tolist(), *item.tolist()]
        assert logits.tolist() == [tape_logit(prompt, int(label)) for label in LABELS]


def start_one(directory, engine, factory, patience):
    served = ServedConfig("one", MODEL, directory=directory)
    (replicas,) = start_models([served], engine, factory, patience)
    return replicas


@pytest.fixture(scope="module", autouse=True)
def tapes_importable():
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def make_replicas(tapes_importable):
    made = []

    def make(factory="prepare", patience=PATIENCE, devices="cpu,cpu", **config):
        engine = EngineConfig(devices=devices, **config)
        factory = f"support.tape_engine:{factory}"
        made.append(start_one(Path("/nowhere"), engine, factory, patience))
        return made[-1]

    yield make
    for replicas in made:
        replicas.close()


@pytest.fixture(scope="module")
def shared(make_replicas):
    return make_replicas(engine_timeout=3.0)


@pytest.fixture
def replicas(shared):
    shared.wait_ready()
    wait_until(lambda: all(state.alive for state in shared.states()))
    MARK.unlink(missing_ok=True)
    return shared


def pids(replicas):
    return [client.pid for client in replicas.engines]


def cores_of(pid):
    return os.sched_getaffinity(pid)


def test_each_engine_has_its_own_cores(replicas):
    first, second = map(cores_of, pids(replicas))
    assert first
    assert second
    assert not first & second
    assert first | second == os.sched_getaffinity(0)


def test_both_answer_and_a_query_stays_where_it_is(replicas):
    requests = [request_of(7, items=3, query=n) for n in range(40)]
    before = [state.stats.counters.batches for state in replicas.states()]
    for request, future in zip(requests, replicas.score_all(requests), strict=True):
        check(request, future.result(timeout=30))
    wait_until(
        lambda: all(
            state.stats.counters.batches > count
            for state, count in zip(replicas.states(), before, strict=True)
        )
    )
    for _ in range(2):
        again = request_of(9, query=320)
        result = replicas.score_all([again])[0].result(timeout=30)
        check(again, result)
    assert result.computed_tokens == again.num_tokens - 320


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_hangs(replicas, harm):
    """It gets no more requests, its own are answered elsewhere, and it comes back."""
    victim = pids(replicas)[0]
    rerun = sum(state.rerun for state in replicas.states())
    requests = [request_of(tape_child.SLOW, n, query=n % 30) for n in range(40)]
    futures = replicas.score_all(requests)
    os.kill(victim, harm)
    # Patience().silent and a tick are below 2 s; a busy machine may add to them.
    wait_until(lambda: not replicas.states()[0].alive, seconds=PATIENCE.stopped - 1)
    assert replicas.alive
    later = request_of(7, items=2)
    check(later, replicas.score_all([later])[0].result(timeout=30))
    for request, future in zip(requests, futures, strict=True):
        check(request, future.result(timeout=30))
    assert sum(state.rerun for state in replicas.states()) > rerun
    wait_until(lambda: replicas.states()[0].alive)
    assert not running(victim)


def test_a_request_that_ends_engines_does_not_end_them_all(replicas):
    restarts = [state.stats.restarts for state in replicas.states()]
    harmless = [request_of(tape_child.SLOW, n) for n in range(3)]
    futures = replicas.score_all([request_of(tape_child.CRASH), *harmless])
    assert not wait(futures, timeout=30).not_done
    with pytest.raises(Unavailable):
        futures[0].result()
    wait_until(lambda: all(state.alive for state in replicas.states()))
    grown = [
        state.stats.restarts - before
        for state, before in zip(replicas.states(), restarts, strict=True)
    ]
    assert grown == [1, 1], "each engine was lost once to it, and none a second time"
    request = request_of(7)
    check(request, replicas.score_all([request])[0].result(timeout=30))


def test_closing_answers_what_waits(replicas):
    """The last test of the shared replicas."""
    assert replicas.about == "tape, 2 replicas"
    futures = replicas.score_all([request_of(tape_child.HELD, n, query=0) for n in range(6)])
    victims, start = pids(replicas), time.monotonic()
    replicas.close()
    assert time.monotonic() - start < 5
    for future in futures:
        with pytest.raises(Unavailable):
            future.result(timeout=0)
    replicas.wait_ended()
    assert not any(map(running, victims))
    assert isinstance(replicas.score_all([request_of()])[0].exception(timeout=0), Unavailable)


def test_the_end_comes_when_no_replica_can_be_kept(make_replicas):
    patience = Patience(delay=0.05, max_failures=1)
    replicas = make_replicas(patience=patience)
    replicas.wait_ready()
    clients = replicas.engines
    for _ in range(2):  # one of them alone may fail more often
        wait_until(lambda: clients[0].alive)
        os.kill(clients[0].pid, signal.SIGKILL)
        wait_until(lambda: not clients[0].alive)
    wait_until(lambda: clients[0].alive)
    assert not clients[0].ended.done()
    wait_until(lambda: clients[1].alive)
    os.kill(clients[1].pid, signal.SIGKILL)
    wait_until(lambda: not clients[1].alive)
    wait_until(lambda: clients[1].alive, seconds=20)
    assert replicas.alive
    assert not clients[1].ended.done(), "the first one serves"

    def killed() -> bool:
        """Kill what has come back while the other's end was not noticed yet."""
        for client in clients:
            with suppress(ProcessLookupError):
                os.kill(client.pid, signal.SIGKILL)
        return any(client.ended.done() for client in clients)

    wait_until(killed, seconds=20)
    with pytest.raises(EngineFailed, match=r"replica \d on cpu: the engine failed \d+ times in a"):
        replicas.wait_ended()


def test_a_replica_that_cannot_start_is_named(make_replicas):
    replicas = make_replicas("refuse")
    with pytest.raises(ConfigError, match="^replica [01] on cpu: /nowhere is refused$"):
        replicas.wait_ready()


# Two failures in a row end an engine that has no hopeful one beside it.
SHORT = Patience(delay=0.05, max_failures=2)


@pytest.fixture
def start():
    made = []

    def start(factory):
        models = [ServedConfig(name, MODEL, directory=Path("/nowhere", name)) for name in "ab"]
        made.extend(start_models(models, EngineConfig(), f"support.tape_engine:{factory}", SHORT))
        return made

    yield start
    for model in made:
        model.close()


def crash(replicas):
    """Have an engine end itself; return once another has taken its place, or none will."""
    (engine,) = replicas.engines
    pid = engine.pid
    (future,) = replicas.score_all([request_of(tape_child.CRASH)])
    with pytest.raises(Unavailable):
        future.result(10)
    wait_until(lambda: engine.ended.done() or (engine.alive and engine.pid != pid))


def test_an_engine_is_started_again_while_one_of_another_model_lives(start):
    untouched_model, other = start("prepare")
    for model in (untouched_model, other):
        model.wait_ready()
    untouched = untouched_model.engines[0].pid
    for _ in range(3):  # one more than it may fail alone
        crash(other)
    assert other.alive
    assert not other.engines[0].ended.done()
    assert (untouched_model.alive, untouched_model.engines[0].pid) == (True, untouched)
    os.kill(untouched, 0)


def test_the_server_ends_when_no_model_has_hope(start, monkeypatch, tmp_path):
    monkeypatch.setenv("TAPE_MARK", str(tmp_path))
    models = start("loads_once")
    for model in models:
        model.wait_ready()
    engines = [model.engines[0] for model in models]
    for engine in engines:
        os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: any(engine.ended.done() for engine in engines))
    ended = next(model for model in models if model.engines[0].ended.done())
    with pytest.raises(EngineFailed, match="the engine failed 2 times in a row"):
        ended.wait_ended()
