"""Promise: a bulk job has an engine for each device of the cluster's nodes, and no two of them
count on the same one."""

import platform
from dataclasses import replace

import pytest

from gpuscore import __version__
from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.worker.messages import Start, decode_to_child
from gpuscore.ray.bulk.node import NodeFacts
from gpuscore.ray.bulk.pool import RayNode, Slot, slots, start_message

MODEL = ModelConfig()
SMALL, LARGE = RayNode("a", "10.0.0.1", 8, 0), RayNode("b", "10.0.0.2", 16, 5)
HEAD = RayNode("c", "10.0.0.3", 0, 0)
NODES = [HEAD, SMALL, LARGE]


def places(found: list[Slot]) -> list[tuple[str | None, float]]:
    """Return each place's node and the number of devices that its actor takes."""
    return [
        (slot.room.node, slot.room.options["num_gpus" if slot.device == "cuda" else "num_cpus"])
        for slot in found
    ]


@pytest.mark.parametrize(
    ("settings", "nodes", "count", "wanted"),
    [
        ({}, NODES, None, [("b", 1)] * 5),
        ({"device": "cuda", "tensor_parallel": 2}, NODES, None, [("b", 2)] * 2),
        ({"device": "cpu"}, NODES, None, [("a", 8), ("b", 16)]),
        ({}, [HEAD, SMALL], None, [("a", 8)]),
        ({"device": "cpu", "threads": 5}, NODES, None, [("a", 5), ("b", 5), ("b", 5), ("b", 5)]),
        ({"device": "cpu", "threads": 5}, NODES, 2, [("a", 5), ("b", 5)]),
        ({"device": "cpu", "threads": 9}, NODES, 3, [("b", 9), (None, 9), (None, 9)]),
        ({"device": "cuda"}, [HEAD], 2, [(None, 1)] * 2),
        ({}, [], 1, [(None, 1)]),
    ],
)
def test_places(settings, nodes, count, wanted):  # type: ignore[no-untyped-def]
    assert places(slots(nodes, replace(MODEL, **settings), count)) == wanted


@pytest.mark.parametrize(
    ("settings", "nodes", "message"),
    [
        ({"device": "cuda"}, [HEAD, SMALL], "no node has 1 GPUs for an engine; set --ray-actors"),
        ({"device": "cuda", "tensor_parallel": 6}, NODES, "no node has 6 GPUs"),
        ({"device": "cpu", "threads": 17}, NODES, "no node has 17 CPUs"),
        ({}, [HEAD], "no node has 1 CPUs"),
        ({"device": "tpu"}, NODES, "--device tpu is not supported with --ray"),
    ],
)
def test_no_place(settings, nodes, message):  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        slots(nodes, replace(MODEL, **settings), None)


def test_nodes_of_other_versions_are_named():  # type: ignore[no-untyped-def]
    """Patch releases of Python may differ."""
    major, minor, _ = platform.python_version_tuple()
    node = NodeFacts("0123456789", "10.0.0.2", f"{major}.{minor}.999", __version__, 8)
    node.check()
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.2 \(01234567\) has Python 3\.9, this"):
        replace(node, python="3.9.1").check()
    with pytest.raises(ConfigError, match=r"\(01234567\) has gpuscore none, this machine has 0"):
        replace(node, gpuscore="none").check()


@pytest.mark.parametrize(
    ("settings", "cores", "wanted"),
    [
        ({}, 16, (None, None)),  # the whole machine: torch chooses
        ({}, 32, (16, None)),  # Ray has a part of it
        ({"threads": 4}, 16, (4, 0.7 / 4)),
        ({"threads": 4, "kv_cache_size": 1000}, 16, (4, None)),
    ],
)
def test_engines_on_a_node_share_its_cores_and_its_memory(settings, cores, wanted):  # type: ignore[no-untyped-def]
    model = replace(MODEL, device="cpu", **settings)
    (slot, *_) = slots([replace(LARGE, gpus=0)], model, None)
    node = NodeFacts("b", "10.0.0.2", "3.11.7", "0.1.0", cores)
    start = decode_to_child(start_message(slot, model, EngineConfig(), node))
    assert isinstance(start, Start)
    threads, share = wanted
    assert start.model.threads == threads
    assert start.model.memory_fraction == (None if share is None else pytest.approx(share))
