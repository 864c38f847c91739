"""The cluster of the tests itself."""

import ray
from ray.cluster_utils import Cluster

from conftest import DEVICE


@ray.remote(resources={DEVICE: 1}, num_cpus=1)
class Placed:
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def test_two_actors_with_a_device_each_are_on_two_nodes(cluster: Cluster) -> None:
    actors = [Placed.remote() for _ in range(2)]
    nodes = {ray.get(actor.node.remote()) for actor in actors}
    for actor in actors:
        ray.kill(actor)
    assert nodes == {node.node_id for node in cluster.list_all_nodes()}
    assert len(nodes) == 2
