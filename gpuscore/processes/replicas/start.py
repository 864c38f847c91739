"""Start of the engines of all models: a process for each model on each device."""

from collections.abc import Sequence
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.processes.replicas.placement import Sought, places_of_all
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import EngineClient
from gpuscore.processes.worker.process import TORCH, Patience, command
from gpuscore.processes.worker.wire import Start
from gpuscore.system.log import LogFormat


def start_replicas(
    directory: Path,
    model: ModelConfig,
    engine: EngineConfig,
    factory: str = TORCH,
    patience: Patience | None = None,
    log_format: LogFormat = "json",
) -> Replicas:
    """Start the engines of one model, in this directory, as `start_models` does."""
    sought = [Sought(directory.name, directory, model)]
    (replicas,) = start_models(sought, engine, factory, patience, log_format)
    return replicas


def start_models(
    models: Sequence[Sought],
    engine: EngineConfig,
    factory: str = TORCH,
    patience: Patience | None = None,
    log_format: LogFormat = "json",
) -> list[Replicas]:
    """Start an engine of each model on each device; return each model's replicas.

    Args:
        models: with their settings.
        engine: the settings of all engines, with the devices.
        factory: prepares a backend (`gpuscore.processes.worker.__main__`).
        patience: when an engine counts as lost.
        log_format: of the engines' processes.

    Raises:
        ConfigError: as `places_of_all`. Errors of the engines themselves are raised by the methods
            of `Replicas` that wait.
    """
    everyone: list[EngineClient] = []
    started = []
    for model, places in zip(models, places_of_all(models, engine.devices), strict=True):
        own = [
            EngineClient(
                command(factory),
                Start(str(model.directory), place.model, engine, place.cores, log_format),
                patience,
                place.environment,
                everyone,
            )
            for place in places
        ]
        everyone += own
        started.append(Replicas(own, [place.device for place in places], engine))
    return started
