"""Promise: several processes use one engine, each with its own ids, and one that leaves frees what
it has queued."""

import os
import signal
from concurrent.futures import wait

import pytest

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.engine.admission import PLACES, Counts
from gpuscore.errors import EngineFailed, Unavailable
from gpuscore.processes.fronts.front import FrontLink
from gpuscore.processes.worker.client import EngineClient, LinkedEngine
from gpuscore.processes.worker.messages import Start
from gpuscore.processes.worker.process import EngineListener, command
from support import tape_engine as tape_child
from support.serving import wait_until
from support.tape_engine import MARK
from worker.test_client import PATIENCE, here, make_client, request_of, same  # noqa: F401


@pytest.fixture(scope="module")
def engine(make_client):  # noqa: F811
    """An engine's supervisor, and its listener."""
    listener = EngineListener()
    start = Start("/nowhere", ModelConfig(), EngineConfig())
    client = EngineClient(command("support.tape_engine:prepare"), start, PATIENCE, listener)
    client.started.result()
    yield client, listener
    client.close()
    listener.close()


@pytest.fixture
def link_up(engine):
    """A factory of fronts' clients."""
    made, links = [], []

    def connect(owner):
        links.append(FrontLink(engine[1].address, "tape", owner, lambda: 7))
        return links[-1]

    def make():
        made.append(LinkedEngine(EngineConfig(), connect, Counts.alone(PLACES)))
        made[-1].started.result()
        return made[-1], links[-1]

    yield make
    for client in made:
        client.close()


def test_each_gets_its_own_answers(engine, link_up, here):  # noqa: F811
    clients = [engine[0], link_up()[0], link_up()[0]]
    assert clients[1].started.result() == here.limits
    sent = []
    for number in range(1, 40):
        for turn, client in enumerate(clients):
            request = request_of(7, 20 * turn, items=number, query=number % 5)
            sent.append((request, client.score(request)))
    for request, future in sent:
        same(future.result(timeout=30), here.score(request).result())


def test_one_that_leaves_frees_its_queued_work(engine, link_up):
    supervisor, (staying, _), (leaving, _) = engine[0], link_up(), link_up()
    MARK.unlink(missing_ok=True)
    held = staying.score(request_of(tape_child.HELD))
    wait_until(MARK.exists)
    waiting = [leaving.score(request_of(items=100)) for _ in range(20)]
    wait_until(lambda: supervisor.stats().requests == 21)
    leaving.close()
    for future in waiting:
        with pytest.raises(Unavailable):
            future.result(timeout=5)
    wait_until(lambda: supervisor.stats().requests == 1)
    MARK.unlink()
    held.result(timeout=30)


def test_a_lost_engine_is_found_again(engine, link_up, here):  # noqa: F811
    supervisor, (client, link) = engine[0], link_up()
    futures = [client.score(request_of(tape_child.STUCK)) for _ in range(3)]
    os.kill(supervisor.pid, signal.SIGKILL)
    assert not wait(futures, timeout=5).not_done
    with pytest.raises(Unavailable) as refused:
        futures[0].result()
    assert refused.value.retry_after == 7, "what the supervisor expects"
    wait_until(lambda: client.alive and supervisor.alive)
    request = request_of(7, items=20)
    same(client.score(request).result(timeout=30), here.score(request).result())
    supervised = supervisor.stats()
    link.tell(supervised)
    assert client.stats() == supervised, "whose counters outlive the engine's processes"


def test_a_silent_engine_is_unhealthy(engine, link_up):
    supervisor, (client, _) = engine[0], link_up()
    os.kill(supervisor.pid, signal.SIGSTOP)
    wait_until(lambda: not client.alive, seconds=3)
    with pytest.raises(Unavailable):
        client.score(request_of())
    wait_until(lambda: client.alive and supervisor.alive)  # killed and started again


def test_an_engine_that_has_failed_for_good(link_up):
    client, link = link_up()
    link.fail(EngineFailed("gone"))
    with pytest.raises(EngineFailed, match="gone"):
        client.ended.result()
