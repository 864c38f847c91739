"""Promise: engines of several models start in turn on a GPU, and outlive each other's losses."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import ConfigError, EngineFailed, Unavailable
from gpuscore.processes.replicas.placement import Placement
from gpuscore.processes.replicas.start import AllReplicas, start_models
from gpuscore.processes.worker.link import Patience
from gpuscore.types.request import ScoreRequest
from support.serving import wait_until
from support.tape_engine import CRASH

# Two failures in a row end an engine that has no hopeful one beside it.
PATIENCE = Patience(first_delay=0.05, max_delay=0.05, max_failures=2)


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    made = []

    def start(factory, in_turn=False):
        place = Placement("cuda:0", ModelConfig(), in_turn=in_turn)
        models = [(Path("/nowhere", name), [place]) for name in "ab"]
        replicas = start_models(models, EngineConfig(), f"support.tape_engine:{factory}", PATIENCE)
        made.append(AllReplicas("ab", replicas))
        return made[-1]

    yield start
    for one in made:
        one.close()


def crash(replicas):
    """Have an engine end itself; return once another has taken its place, or none will."""
    (engine,) = replicas.engines
    pid = engine.pid
    ids = np.array([CRASH], np.int32)
    (future,) = replicas.score_all([ScoreRequest(ids, (ids,), (ids,), True)])
    with pytest.raises(Unavailable):
        future.result(10)
    wait_until(lambda: engine.ended.done() or (engine.alive and engine.pid != pid))


def test_an_engine_waits_for_the_one_before_it_on_its_gpu(start):
    together = start("prepare", in_turn=True)
    first, second = together.engines
    together.wait_planned(1)
    assert first.started.done()
    together.wait_ready()
    assert second.alive


def test_one_that_waits_is_never_started_after_a_refusal_and_ends_at_once(start):
    together = start("refuse", in_turn=True)
    with pytest.raises(ConfigError, match="--model a: /nowhere/a is refused"):
        together.wait_ready()
    assert together.engines[1].pid is None
    together.close()
    assert isinstance(together.engines[1].started.exception(), EngineFailed)


def test_an_engine_is_started_again_while_one_of_another_model_lives(start):
    together = start("prepare")
    together.wait_ready()
    one, other = together.models
    untouched = one.engines[0].pid
    for _ in range(3):  # one more than it may fail alone
        crash(other)
    assert other.alive
    assert not other.engines[0].ended.done()
    assert (one.alive, one.engines[0].pid) == (True, untouched)
    os.kill(untouched, 0)


def test_the_server_ends_when_no_model_has_hope(start, monkeypatch, tmp_path):
    monkeypatch.setenv("TAPE_MARK", str(tmp_path))
    together = start("loads_once")
    together.wait_ready()
    for engine in together.engines:
        os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: any(engine.ended.done() for engine in together.engines))
    with pytest.raises(EngineFailed, match="--model [ab]: the engine failed 2 times in a row"):
        together.wait_ended()
