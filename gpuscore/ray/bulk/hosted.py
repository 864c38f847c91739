"""The actor's side of an engine: its process and supervisor, and the messages to the driver that do
not come from the engine's process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import sleep
from typing import TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout
from gpuscore.models.hub import model_directory
from gpuscore.processes.worker.frames import Message, ProtocolError, Send, decoded, encode
from gpuscore.processes.worker.link import Supervisor
from gpuscore.processes.worker.messages import Failure, Natural, Result, Start, decode_to_child
from gpuscore.processes.worker.process import TORCH, Patience, command
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
        error: class name and text of the error that ended the engine for good.
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
    """Return an error as `ActorState` has it; an unexpected class becomes EngineFailed."""
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


ValueT = TypeVar("ValueT")

GATHER = 0.005  # seconds from the first answer until a reply: the others then need no call


class HostedEngine:
    """An engine's process under a supervisor, as `gpuscore serve` runs it.

    Args:
        model, revision: name the directory on this node.
        start: an encoded `Start`, whose directory is replaced.
    """

    def __init__(self, model: str, revision: str | None, start: bytes) -> None:
        given = decode_to_child(start)
        if not isinstance(given, Start):
            raise ProtocolError("the first message is not Start")
        here = replace(given, directory=str(model_directory(model, revision)))
        self._changed = threading.Condition()
        self._messages: list[bytes] = []  # at most one for each request in flight, and a few
        self._send: Send | None = None
        self._supervisor = Supervisor(
            command(TORCH), here, self, Patience(), {}, may_give_up=lambda: True
        )
        self._supervisor.start()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send messages to the process. Without a process they are dropped: `Lost` is on its way to
        the driver, which will send the requests again."""
        send = self._send
        if send is not None:
            send(*(partial(bytes, frame) for frame in frames))

    def receive(self, seconds: float) -> tuple[bytes, list[bytes]]:
        """Wait for a message at most this long; return the state and all messages, in order."""
        with self._changed:
            found = self._changed.wait_for(lambda: bool(self._messages), seconds)
        if found:
            sleep(GATHER)
        with self._changed:
            messages, self._messages = self._messages, []
        return encode(self._state()), messages

    def on_ready(self, send: Send) -> None:
        self._send = send
        self._put(Opened())

    def on_answer(self, answer: Result | Failure) -> None:
        self._put(answer)

    def on_silent(self) -> None:
        self._put(Silent())

    def on_lost(self) -> None:
        self._send = None
        self._put(Lost())

    def _put(self, message: Message) -> None:
        with self._changed:
            self._messages.append(encode(message))
            self._changed.notify()

    def _state(self) -> ActorState:
        watched = self._supervisor
        error = watched.ended.exception() if watched.ended.done() else None
        return ActorState(
            _result(watched.planned),
            watched.loaded,
            _result(watched.started),
            watched.healthy,
            watched.stats,
            watched.reported.number,
            watched.restarts,
            watched.retry_after,
            None if error is None else described(error),
        )


def _result(future: "Future[ValueT]") -> ValueT | None:
    return future.result() if future.done() and future.exception() is None else None
