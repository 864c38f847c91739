"""The cluster and the engines of a bulk job on it, as the replicas of one model."""

import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.models.hub import DEMO
from gpuscore.processes.replicas.placement import share_of_cpu
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import LinkedEngine
from gpuscore.processes.worker.frames import encode
from gpuscore.processes.worker.link import ChildListener
from gpuscore.processes.worker.messages import Start
from gpuscore.ray.bulk.actor_link import ActorLink, Hosting, Room
from gpuscore.ray.bulk.node import NodeFacts, digests, node_name
from gpuscore.types.batch import BackendLimits

AUTO, CLIENT = "auto", "ray://"
TCP_SECONDS = 5.0
# Ray's own attempt takes two minutes and then ends the process: first, one tries that may be ended.
# A Ray client's server starts a process for each driver.
TRY_SECONDS = 60.0
_TRY = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"
_ADDRESS = re.compile(r"(ray://)?(?P<host>\[[^\]]+\]|[^:/\s]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive, with Ray's counts of its resources, in whole numbers."""

    id: str
    address: str
    cpus: int
    gpus: int

    @property
    def name(self) -> str:
        return node_name(self.address, self.id)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one engine.

    Attributes:
        device: cpu or cuda.
        room: the resources that its actor asks Ray for.
        cpus: of the engine, on a CPU.
        together: engines that share the node's memory.
    """

    device: str
    room: Room
    cpus: int = 1
    together: int = 1


@contextmanager
def connected(address: str) -> Iterator[list[RayNode]]:
    """Connect this process to a cluster; yield the nodes that are alive.

    Raises:
        ConfigError: the address is invalid, or no cluster answers there.
    """
    _try(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, RuntimeError, OSError) as error:  # it was lost since
        raise ConfigError(f"--ray {address}: Ray cannot connect: {error}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's own gives another exit code
    try:
        yield [
            RayNode(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                int(node["Resources"].get("GPU", 0)),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
    finally:
        ray.shutdown()


def slots(nodes: Sequence[RayNode], model: ModelConfig, count: int | None) -> list[Slot]:
    """Return places for `count` engines, or for as many as the nodes have devices.

    An engine on GPUs takes one, or `--tensor-parallel` of them. One on a CPU takes `--threads`
    CPUs, or the node's if that is not set. Places beyond the nodes' devices are for nodes that join
    later.

    Raises:
        ConfigError: there is no such device, or the cluster has none and `count` is None.
    """
    if model.device == "tpu":
        raise ConfigError("--device tpu is not supported with --ray; supported: auto, cpu, cuda")
    cuda = model.device == "cuda" or (model.device == "auto" and any(one.gpus for one in nodes))
    on_nodes = [_on_gpus(node, model) if cuda else _on_cpus(node, model) for node in nodes]
    # One of each node first, so that few engines have many nodes.
    longest = max((len(one) for one in on_nodes), default=0)
    found = [one[turn] for turn in range(longest) for one in on_nodes if turn < len(one)]
    if count is None and not found:
        needs = f"{model.tensor_parallel} GPUs" if cuda else f"{model.threads or 1} CPUs"
        raise ConfigError(
            f"--ray: no node has {needs} for an engine; set --ray-actors to wait for nodes"
        )
    if count is None or count <= len(found):
        return found[:count]
    anywhere = _on_gpus(None, model) if cuda else _on_cpus(None, model)
    return found + anywhere * (count - len(found))


def _on_gpus(node: RayNode | None, model: ModelConfig) -> list[Slot]:
    """Return the places on a node's GPUs; without a node, a place on any node."""
    ranks = model.tensor_parallel
    room = Room({"num_cpus": 1, "num_gpus": ranks}, None if node is None else node.id)
    return [Slot("cuda", room)] * (1 if node is None else node.gpus // ranks)


def _on_cpus(node: RayNode | None, model: ModelConfig) -> list[Slot]:
    cpus = model.threads or (1 if node is None else max(1, node.cpus))
    room = Room({"num_cpus": cpus}, None if node is None else node.id)
    count = 1 if node is None else node.cpus // cpus
    return [Slot("cpu", room, cpus, max(1, count))] * count


def _try(address: str) -> None:
    """Raise ConfigError unless a cluster answers at the address."""
    if address != AUTO:
        _reach(address)
    command = [sys.executable, "-P", "-c", _TRY, address]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRY_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--ray {address}: no Ray cluster has answered in {TRY_SECONDS:g} s"
        ) from None
    if done.returncode:
        told = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"--ray {address}: Ray cannot connect: {told[0]}")


def _reach(address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ConfigError(f"--ray {address}: the address is not auto, HOST:PORT or ray://HOST:PORT")
    try:
        host: Any = found["host"].strip("[]")
        socket.create_connection((host, int(found["port"])), TCP_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray {address}: nothing answers there: {error}") from None


class ActorEngine(LinkedEngine[ActorLink]):
    """The client of an engine that an actor hosts.

    Args:
        others: the engines of the pool; some are made after this engine.
    """

    def __init__(
        self, config: EngineConfig, hosting: Hosting, others: Sequence["ActorEngine"]
    ) -> None:
        def known() -> BackendLimits | None:
            alive = (one for one in others if one is not self and one.alive)
            return next((one.started.result() for one in alive), None)

        def connect(owner: ChildListener) -> ActorLink:
            return ActorLink(hosting, owner, self.may_give_up, known)

        super().__init__(config, connect, own=others, everyone=others)

    @property
    def node(self) -> NodeFacts | None:
        return self._supervisor.node


@contextmanager
def ray_replicas(
    address: str, actors: int | None, directory: Path, model: ModelConfig, engine: EngineConfig
) -> Iterator[tuple[Replicas, Callable[[], str]]]:
    """Have engines started on a cluster; they end with this context, or with this process.

    Args:
        actors: number of engines; None: as many as the nodes have devices for.
        directory: the model's, on this machine.

    Yields:
        The replicas, and a function that says where they are.

    Raises:
        ConfigError: as `connected` and `slots`. Errors of the nodes and engines are raised by the
            methods of `Replicas` that wait.
    """
    with connected(address) as nodes:
        places = slots(nodes, model, actors)
        files = digests(directory)
        engines: list[ActorEngine] = []
        for slot in places:
            start = partial(start_message, slot, model, engine)
            name, first = _named(model.model), not engines
            hosting = Hosting(slot.room, name, model.revision, files, start, first)
            engines.append(ActorEngine(engine, hosting, engines))
        names = [slot.device for slot in places]
        with closing(Replicas(engines, names, _for_all(engine, len(engines)))) as replicas:
            yield replicas, partial(_told, address, engines, places)


def _named(model: str) -> str:
    """Return the model's name for nodes, which have other working directories."""
    path = Path(model)
    return str(path.absolute()) if model != DEMO and path.is_dir() else model


def _for_all(engine: EngineConfig, count: int) -> EngineConfig:
    """Return the limits of all engines together; the settings have the limits of each engine."""
    return replace(
        engine,
        max_queued_requests=engine.max_queued_requests * count,
        max_queued_tokens=engine.max_queued_tokens * count,
        max_queued_items=engine.max_queued_items * count,
    )


def start_message(slot: Slot, model: ModelConfig, engine: EngineConfig, node: NodeFacts) -> bytes:
    """Return the encoded `Start` of an engine on a node; the node fills in its directory."""
    own = replace(model, device=slot.device)
    if slot.device == "cpu":
        own = share_of_cpu(own, slot.together) if slot.together > 1 else own
        if model.threads is None and slot.cpus < node.cores:
            own = replace(own, threads=slot.cpus)
    return encode(Start("", own, engine, log_format="text"))


def _told(address: str, engines: Sequence[ActorEngine], places: Sequence[Slot]) -> str:
    """Return where the engines are, one node a line."""
    found: dict[str, list[str]] = {}
    for one, slot in zip(engines, places, strict=True):
        node = one.node
        where = "no room yet" if node is None or not one.alive else node.name
        found.setdefault(where, []).append(slot.device)
    lines = [f"  {where}: {', '.join(devices)}" for where, devices in found.items()]
    counted = f"{len(engines)} engine" + ("s" if len(engines) > 1 else "")
    return "\n".join([f"gpuscore: {counted} on the Ray cluster at {address}", *lines])
