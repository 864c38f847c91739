"""The cluster of the tests itself: two nodes, each with a device."""

import ray
from ray.cluster_utils import Cluster

from conftest import DEVICE


def test_two_nodes_have_a_device_each(cluster: Cluster) -> None:
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    assert alive.keys() == {node.node_id for node in cluster.list_all_nodes()}
    assert [resources[DEVICE] for resources in alive.values()] == [1.0, 1.0]
