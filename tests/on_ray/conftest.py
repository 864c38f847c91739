"""A Ray cluster of two nodes on this machine, and an application on it, which all tests share.
Starting each takes seconds."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes import FOLDER, HEAD, NODE, patiently  # before Ray, which reads its variables then

# isort: split
import ray
from ray import serve
from ray.cluster_utils import Cluster

from applications import Server


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
def server(cluster: Cluster) -> Iterator[Server]:
    """An application, started once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    started = Server(f"http://127.0.0.1:{port}", Path(FOLDER, "serve.yaml"))
    started.deploy()
    yield started
    serve.shutdown()
