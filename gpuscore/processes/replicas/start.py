"""The start of all replicas: one engine process of each model on each device."""

from collections.abc import Sequence
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.processes.replicas.placement import Placement, placements
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import EngineClient, Siblings
from gpuscore.processes.worker.messages import Start
from gpuscore.processes.worker.patience import Patience
from gpuscore.processes.worker.process import TORCH, EngineListener, command
from gpuscore.system.log import LogFormat


def start_replicas(
    directory: Path,
    model: ModelConfig,
    engine: EngineConfig,
    factory: str = TORCH,
    patience: Patience | None = None,
    listeners: Sequence[EngineListener] | None = None,
    log_format: LogFormat = "json",
) -> Replicas:
    """Start an engine process on each device of `engine.devices`, or one on `model.device`.

    Args:
        directory: the model's.
        model, engine: the settings.
        factory, patience, listeners, log_format: as in `start_models`.

    Raises:
        ConfigError: the devices cannot be used together. Errors of the engines themselves are
            raised by the methods of `Replicas` that wait.
    """
    places = placements(model, engine.devices)
    (replicas,) = start_models(
        [(directory, places)], engine, factory, patience, listeners, log_format
    )
    return replicas


def start_models(
    models: Sequence[tuple[Path, Sequence[Placement]]],
    engine: EngineConfig,
    factory: str = TORCH,
    patience: Patience | None = None,
    listeners: Sequence[EngineListener] | None = None,
    log_format: LogFormat = "json",
) -> list[Replicas]:
    """Start an engine process of each model at each of its places; return each model's replicas.

    Args:
        models: their directories and places.
        engine: the settings of all engines.
        factory: prepares a backend (`gpuscore.processes.worker.__main__`).
        patience: when an engine counts as lost.
        listeners: by which fronts reach each engine, model by model.
        log_format: of the engines' processes.
    """
    everyone: list[EngineClient] = []
    before: dict[str, EngineClient] = {}  # the last one on each device
    started = []
    for directory, places in models:
        own: list[EngineClient] = []
        for place in places:
            last = before.get(place.device) if place.in_turn else None
            client = EngineClient(
                command(factory),
                Start(str(directory), place.model, engine, place.cores, log_format),
                patience,
                listeners[len(everyone)] if listeners else None,
                place.environment,
                _siblings(own, everyone, len(own), len(everyone)),
                None if last is None else last.started,
            )
            own.append(client)
            everyone.append(client)
            before[place.device] = client
        started.append(Replicas(own, [place.device for place in places], engine))
    return started


def _siblings(
    own: Sequence[EngineClient], everyone: Sequence[EngineClient], number: int, place: int
) -> Siblings:
    """Return what an engine may ask about the others, of which some are started after it.

    Args:
        own: of its model.
        everyone: of all models. While one of them is hopeful, the server goes on, and so does every
            engine.
        number: its place in `own`.
        place: its place in `everyone`.
    """
    return Siblings(
        ready=lambda: any(one.alive for index, one in enumerate(own) if index != number),
        hopeful=lambda: any(one.hopeful for index, one in enumerate(everyone) if index != place),
    )
