"""The engines of a job: on this machine, or on the nodes of a Ray cluster."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.replicas.start import start_replicas

# The replicas, and what says where they are once they are ready.
Started: TypeAlias = tuple[Replicas, Callable[[], str]]


@dataclass(frozen=True, slots=True)
class BatchEngines:
    """The place of a job's engines; a run may continue another one's job elsewhere.

    Attributes:
        address: of a Ray cluster; None: this machine.
        actors: number of engines there; None: as many as there is room for.
    """

    address: str | None = None
    actors: int | None = None

    def started(
        self, directory: Path, model: ModelConfig, engine: EngineConfig
    ) -> AbstractContextManager[Started]:
        """Have the engines started; they end with the context. Raises ConfigError."""
        if self.address is None:
            return _here(directory, model, engine)
        from gpuscore.ray.bulk.pool import ray_replicas

        return ray_replicas(self.address, self.actors, directory, model, engine)


def read_engines(values: argparse.Namespace, engine: EngineConfig) -> BatchEngines:
    """Return the command line's place; raise ConfigError for options that do not fit together."""
    if values.ray is None:
        if values.ray_actors is not None:
            raise ConfigError("--ray-actors needs --ray")
        return BatchEngines()
    if find_spec("ray") is None:
        raise ConfigError("--ray needs Ray: pip install 'gpuscore[ray]'")
    if engine.devices is not None:
        raise ConfigError(
            f"--ray excludes --devices {engine.devices}: Ray chooses nodes and their devices"
        )
    return BatchEngines(values.ray, values.ray_actors)


@contextmanager
def _here(directory: Path, model: ModelConfig, engine: EngineConfig) -> Iterator[Started]:
    with closing(start_replicas(directory, model, engine, log_format="text")) as replicas:
        yield replicas, lambda: ""
