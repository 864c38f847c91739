"""A Ray cluster of two nodes on this machine, and an application on it, which all tests share.
Starting each takes seconds."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes import FOLDER, HEAD, NODE, patiently  # before Ray, which reads its variables then

# isort: split
import ray
from ray import serve
from ray.cluster_utils import Cluster

from applications import ARGUMENTS, PATIENCE, Server


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
    """An application that Ray's command line has started, as the documentation says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking"]
    command += ["--address", cluster.address, "gpuscore.ray:app"]
    command += [f"{name}={value}".replace("=False", "=false") for name, value in ARGUMENTS.items()]
    subprocess.run(command, check=True, timeout=PATIENCE)
    yield Server(f"http://127.0.0.1:{port}", ARGUMENTS)
    serve.shutdown()
