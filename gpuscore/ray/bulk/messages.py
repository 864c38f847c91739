"""The messages from an actor to its driver, beside those of the engine's process."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec

from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout
from gpuscore.processes.worker.frames import Message, decoded
from gpuscore.processes.worker.messages import Failure, Natural, Result
from gpuscore.types.batch import BackendLimits
from gpuscore.types.stats import EngineStats


class Opened(Message, frozen=True):
    """The engine's process is ready."""


class Silent(Message, frozen=True):
    """The engine's process counts as unhealthy; it may be heard again."""


class Lost(Message, frozen=True):
    """The engine's process is lost; it will send no further answers."""


class ActorState(Message, frozen=True):
    """The engine's state on its node, as its supervisor knows it.

    Attributes:
        about, limits: None until they are known.
        loaded: bytes of weights read, and of all.
        heartbeats: so far.
        error: name of the class and text of what ended the engine for good.
    """

    about: str | None
    loaded: tuple[Natural, Natural]
    limits: BackendLimits | None
    healthy: bool
    stats: EngineStats
    heartbeats: Natural
    restarts: Natural
    retry_after: Natural
    error: tuple[str, str] | None = None


def described(error: BaseException) -> tuple[str, str]:
    """Return an error as `ActorState` has it; one of an unexpected class is an EngineFailed."""
    name = type(error).__name__
    return (name if name in _KINDS else EngineFailed.__name__), str(error)


def raised(error: tuple[str, str], where: str) -> ConfigError | EngineFailed:
    """Return the error of a `ActorState`, with the place where it was raised."""
    name, text = error
    return _KINDS.get(name, EngineFailed)(f"{where}: {text}")


FromHost: TypeAlias = Result | Failure | Opened | Silent | Lost

_KINDS = {kind.__name__: kind for kind in (ConfigError, EngineFailed, LoadTimeout)}

# Decode a frame of an actor; raise ProtocolError if it is no such message.
decode_from_host: Callable[[bytes], FromHost] = partial(decoded, msgspec.msgpack.Decoder(FromHost))
decode_state: Callable[[bytes], ActorState] = partial(decoded, msgspec.msgpack.Decoder(ActorState))
