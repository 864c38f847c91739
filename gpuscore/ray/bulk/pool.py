"""The engines of a bulk job on a Ray cluster, as the replicas of one model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.models.hub import DEMO
from gpuscore.processes.replicas.placement import share_of_cpu
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import LinkedEngine
from gpuscore.processes.worker.frames import encode
from gpuscore.processes.worker.link import ChildListener
from gpuscore.processes.worker.messages import Start
from gpuscore.ray.bulk.actor_link import ActorLink, Hosting
from gpuscore.ray.bulk.cluster import Slot, connected, slots
from gpuscore.ray.bulk.node import NodeFacts, digests
from gpuscore.types.batch import BackendLimits


class ActorEngine(LinkedEngine[ActorLink]):
    """The client of an engine that an actor hosts.

    Args:
        others: the engines of the pool, of which some are made after this one.
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
    """Return the name by which nodes look for the model: they have other working directories."""
    path = Path(model)
    return str(path.absolute()) if model != DEMO and path.is_dir() else model


def _for_all(engine: EngineConfig, count: int) -> EngineConfig:
    """Return the limits of all engines together: the settings' are those of each of them."""
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
