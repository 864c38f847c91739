"""The start of all replicas: one engine process on each device."""

from collections.abc import Sequence
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.log import LogFormat
from gpuscore.replicas.placement import placements
from gpuscore.replicas.replicas import Replicas
from gpuscore.worker.client import EngineClient, Siblings
from gpuscore.worker.messages import Start
from gpuscore.worker.patience import Patience
from gpuscore.worker.process import TORCH, EngineListener, command


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
        factory: prepares a backend (`gpuscore.worker.__main__`).
        patience: when an engine counts as lost.
        listeners: by which fronts reach each engine.
        log_format: of the engines' processes.

    Raises:
        ConfigError: the devices cannot be used together. Errors of the engines themselves are
            raised by the methods of `Replicas` that wait.
    """
    places = placements(model, engine.devices)
    clients: list[EngineClient] = []
    for number, place in enumerate(places):
        start = Start(str(directory), place.model, engine, place.cores, log_format)
        siblings = _siblings(clients, number)
        listener = listeners[number] if listeners else None
        clients.append(
            EngineClient(command(factory), start, patience, listener, place.environment, siblings)
        )
    return Replicas(clients, [place.device for place in places], engine)


def _siblings(clients: Sequence[EngineClient], number: int) -> Siblings:
    """Return what a replica may ask about the others, of which some are started after it."""

    def others() -> list[EngineClient]:
        return [client for index, client in enumerate(clients) if index != number]

    return Siblings(
        ready=lambda: any(client.alive for client in others()),
        hopeful=lambda: any(client.hopeful for client in others()),
    )
