"""A Ray cluster of two nodes on this machine, which all tests share. Starting one takes seconds."""

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A folder of the cluster's own, with a short path, because the paths of sockets are limited.
FOLDER = tempfile.mkdtemp(prefix="gs-")
Path(FOLDER, "ray").mkdir()  # before Ray notes an address there
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)  # several clusters may use it

# Read by ray when it is imported, and by the processes that it starts. Nothing is reported to its
# makers; and the machine's other work must not let it kill a worker for want of memory.
os.environ.update(
    RAY_TMPDIR=FOLDER,
    RAY_USAGE_STATS_ENABLED="0",
    RAY_memory_monitor_refresh_ms="0",
    RAY_DEDUP_LOGS="0",
    RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="0.5",
    RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S="0.5",
    HF_HUB_OFFLINE="1",
    # As docs/how-to/ray.md advises.
    RAY_SERVE_ENABLE_HA_PROXY="1",
    RAY_SERVE_HAPROXY_RETRY_ON="conn-failure empty-response",
    RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",  # of replicas that go; 30 is its default
)

import pytest  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

DEVICE = "device"  # a resource of each node, one of it: what a GPU is elsewhere
NODE: dict[str, object] = {
    "num_cpus": 0,  # so that the HTTP layer stays on the first node
    "resources": {DEVICE: 1},
    "object_store_memory": 100 * 2**20,
    "include_dashboard": False,
}
HEAD = {**NODE, "num_cpus": 4}  # two of the HTTP layer's, two of actors


def patiently(start: Callable[[], Any]) -> Any:
    """Start a node. Ray gives one 30 seconds, which a busy machine may exceed."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of two nodes, to whose first one this process is connected."""
    started = Cluster()
    try:
        patiently(lambda: started.add_node(**HEAD, temp_dir=f"{FOLDER}/ray"))
        patiently(lambda: started.add_node(**NODE))
        ray.init(address=started.address, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


@pytest.fixture(scope="session")
def ray_serve(cluster: Cluster) -> Iterator[str]:
    """Ray Serve on the cluster, without an application; returns the address of its proxy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
