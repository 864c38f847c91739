"""Promise: while engines, nodes and settings change under load, no request is lost: each gets its
answer, or within its time an error that says so."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray import serve
from ray.cluster_utils import Cluster

import gpuscore
from applications import (
    Load,
    Server,
    kill_a_replica,
    kill_an_engine,
    kill_an_http_process,
    load,
    wait_until,
)
from nodes import NODE, SPARE, patiently


@pytest.fixture
def two_engines(server: Server) -> Server:
    server.deploy()
    return server


@pytest.fixture
def second_node(cluster: Cluster) -> Iterator[object]:
    """The node that has an engine and nothing else; a new one takes its place."""
    (node,) = cluster.worker_nodes
    yield node
    patiently(lambda: cluster.add_node(**NODE))


def answers(running: Load, more: int = 20) -> None:
    """Wait for `more` further answers."""
    before = running.answered
    wait_until(lambda: running.answered >= before + more, "answers")


def test_the_process_of_an_engine_that_dies_is_replaced(two_engines: Server) -> None:
    before = sum(two_engines.metric("gpuscore_engine_restarts_total").values())
    with load(two_engines) as running:
        answers(running)
        kill_an_engine()
        wait_until(
            lambda: sum(two_engines.metric("gpuscore_engine_restarts_total").values()) > before,
            "a restart",
        )
        two_engines.wait_for_engines(2)
        answers(running)
    assert set(running.statuses) == {200}, running.bodies
    assert running.wrong == 0
    assert sum(two_engines.metric("gpuscore_rerun_total").values()) > 0


def test_every_request_ends_when_a_node_is_killed(
    two_engines: Server, cluster: Cluster, second_node: object
) -> None:
    limit = 30
    with load(two_engines, timeout=limit) as running:
        answers(running)
        cluster.remove_node(second_node, allow_graceful=False)
        answers(running, 40)
    assert set(running.statuses) <= {200, 503}
    assert all('"code":"unavailable"' in body for body in running.bodies), running.bodies
    assert running.wrong == 0
    assert running.slowest < limit
    assert two_engines.score("a", ["b"]).status_code == 200


def test_no_request_is_lost_when_settings_and_the_model_change(
    server: Server, tmp_path: Path
) -> None:
    """Engines and HTTP processes of both models are there for some time."""
    other = tmp_path / "other"
    shutil.copytree(Path(gpuscore.__file__).parent / "demo", other)
    options = {"num_cpus": 0, "resources": {SPARE: 1}}
    places = {"engine": {"num_replicas": 3, "ray_actor_options": options}}
    places |= {"http": {"num_replicas": 2}}
    server.deploy(**places)
    with load(server) as running:
        answers(running)
        server.deploy(**places, model=str(other), max_batch_tokens=256, max_items=7)
        answers(running)
    assert set(running.statuses) == {200}, running.bodies
    assert running.wrong == 0
    assert server.score("a", ["b"]).json()["model"] == "other"
    assert server.score("a", ["b"] * 8).status_code == 400  # the new limit


def test_few_requests_are_lost_with_an_http_process(server: Server) -> None:
    """HAProxy sends most again; at most those in flight, one for each thread, get Ray's 500."""
    server.deploy({"num_replicas": 1}, {"num_replicas": 2})
    with load(server) as running:
        answers(running)
        kill_an_http_process()
        answers(running, 100)
    assert set(running.statuses) <= {200, 500}, running.bodies
    assert running.statuses[500] <= 4, running.bodies
    assert running.wrong == 0


def test_engines_come_and_go_with_the_load(server: Server) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    scaling |= {"upscale_delay_s": 0, "downscale_delay_s": 1, "look_back_period_s": 1}
    server.deploy({"num_replicas": None, "autoscaling_config": scaling})
    wait_until(lambda: running_engines() == 1, "one engine")
    with load(server, threads=8, items=400) as running:
        wait_until(lambda: running_engines() == 2, "a second engine")
        answers(running)
    assert set(running.statuses) == {200}, running.bodies
    wait_until(lambda: running_engines() == 1, "one engine less")
    assert server.score("a", ["b"]).status_code == 200


@pytest.mark.parametrize("kill", [kill_an_engine, kill_a_replica])
def test_requests_are_refused_while_there_is_no_engine(
    server: Server, kill: Callable[[], None]
) -> None:
    limit = 60
    server.deploy({"num_replicas": 1})
    with load(server, timeout=limit) as running:
        answers(running)
        kill()
        answers(running, 40)
    assert set(running.statuses) <= {200, 503}
    assert all('"code":"unavailable"' in body for body in running.bodies), running.bodies
    assert running.slowest < limit
    assert running.wrong == 0


def running_engines() -> int:
    """Return the number of engines that Ray runs."""
    engines = serve.status().applications["default"].deployments["engine"]
    return int(engines.replica_states.get("RUNNING", 0))
