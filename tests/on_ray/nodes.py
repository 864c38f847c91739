"""The settings of the tests' clusters, and of Ray itself; imported before it."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
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

DEVICE = "device"  # a resource of each node, one of it: what a GPU is elsewhere
NODE: dict[str, object] = {
    "num_cpus": 0,  # so that the HTTP layer stays on the first node
    "resources": {DEVICE: 1},
    "object_store_memory": 100 * 2**20,
    "include_dashboard": False,
}
SPARE = "spare"  # of the first node, for more engines than there are nodes
# Two CPUs are the HTTP layer's, two are for actors.
HEAD = {**NODE, "num_cpus": 4, "resources": {DEVICE: 1, SPARE: 3}}


def patiently(start: Callable[[], Any]) -> Any:
    """Start a node. Ray gives one 30 seconds, which a busy machine may exceed."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()
