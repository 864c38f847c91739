"""Start and end of the engines of all models: a process for each model on each device."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import ConfigError, EngineFailed
from gpuscore.processes.replicas.placement import CPU, Placement, placements
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import EngineClient
from gpuscore.processes.worker.process import TORCH, Patience, command
from gpuscore.processes.worker.wire import Start
from gpuscore.system.log import LogFormat
from gpuscore.types.batch import BackendLimits


def start_replicas(
    directory: Path,
    model: ModelConfig,
    engine: EngineConfig,
    factory: str = TORCH,
    patience: Patience | None = None,
    log_format: LogFormat = "json",
) -> Replicas:
    """Start an engine process on each device of `engine.devices`, or one on `model.device`.

    Args:
        directory: the model's.
        model, engine: the settings.
        factory, patience, log_format: as in `start_models`.

    Raises:
        ConfigError: the devices cannot be used together. Errors of the engines themselves are
            raised by the methods of `Replicas` that wait.
    """
    places = placements(model, engine.devices)
    (replicas,) = start_models([(directory, places)], engine, factory, patience, log_format)
    return replicas


def start_models(
    models: Sequence[tuple[Path, Sequence[Placement]]],
    engine: EngineConfig,
    factory: str = TORCH,
    patience: Patience | None = None,
    log_format: LogFormat = "json",
) -> list[Replicas]:
    """Start an engine process of each model at each of its places; return each model's replicas.

    Args:
        models: their directories and places.
        engine: the settings of all engines.
        factory: prepares a backend (`gpuscore.processes.worker.__main__`).
        patience: when an engine counts as lost.
        log_format: of the engines' processes.
    """
    everyone: list[EngineClient] = []
    before: dict[str, Future[BackendLimits]] = {}  # the start of the last one on each device
    started = []
    for directory, places in models:
        own: list[EngineClient] = []
        for place in places:
            # On CPUs the format may follow from a measurement, which has to be one for all.
            measured = place.model.dtype == "auto" and place.device == CPU
            client = EngineClient(
                command(factory),
                Start(str(directory), place.model, engine, place.cores, log_format),
                patience,
                place.environment,
                own,
                everyone,
                before.get(place.device) if place.in_turn else None,
                own[0].dtype if measured and own else None,
            )
            own.append(client)
            everyone.append(client)
            before[place.device] = client.started
        started.append(Replicas(own, [place.device for place in places], engine))
    return started


class AllReplicas:
    """The replicas of each model; with one model it adds nothing.

    Args:
        names: of the models.
        models: their replicas.
    """

    def __init__(self, names: Sequence[str], models: Sequence[Replicas]) -> None:
        self.models = models
        self.names = names

    @property
    def engines(self) -> list[EngineClient]:
        """The engines, model by model."""
        return [engine for model in self.models for engine in model.engines]

    def wait_planned(self, number: int) -> str:
        """Return a description of a planned model; raises as `Replicas.wait_planned`."""
        with self.named(number):
            return self.models[number].wait_planned()

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.models)) as pool:
            for _ in pool.map(lambda model: model.close(), self.models):
                pass

    @contextmanager
    def named(self, number: int) -> Iterator[None]:
        """Begin the errors of one of several models with its name."""
        try:
            yield
        except (ConfigError, EngineFailed) as error:
            if len(self.models) == 1:
                raise
            raise type(error)(f"--model {self.names[number]}: {error}") from error
