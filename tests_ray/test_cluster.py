"""The cluster of the tests itself: two nodes, each with a device."""

import ray
from ray.cluster_utils import Cluster

from applications import wait_until
from nodes import DEVICE


def devices() -> dict[str, float]:
    return {node["NodeID"]: node["Resources"][DEVICE] for node in ray.nodes() if node["Alive"]}


def test_two_nodes_have_a_device_each(cluster: Cluster) -> None:
    wanted = {node.node_id: 1.0 for node in cluster.list_all_nodes()}
    assert len(wanted) == 2
    wait_until(lambda: devices() == wanted, "two nodes")  # Ray may not have missed a killed one yet
