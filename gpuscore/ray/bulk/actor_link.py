"""The driver's way to an engine that an actor hosts, on whichever node Ray finds room for it; Ray's
errors become one kind of loss."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpuscore.engine.admission import MAX_RETRY_AFTER
from gpuscore.errors import ConfigError, EngineFailed
from gpuscore.processes.worker.frames import Make, ProtocolError
from gpuscore.processes.worker.link import (
    TICK,
    ChildListener,
    EngineLink,
    passed,
    same_model,
)
from gpuscore.processes.worker.messages import Failure, Result
from gpuscore.processes.worker.process import Patience
from gpuscore.ray.bulk import actor as actor_module
from gpuscore.ray.bulk.actor import EngineActor
from gpuscore.ray.bulk.hosted import (
    ActorState,
    Lost,
    Opened,
    Silent,
    decode_from_host,
    decode_state,
    raised,
)
from gpuscore.ray.bulk.node import Digests, NodeFacts
from gpuscore.types.batch import BackendLimits
from gpuscore.types.stats import EngineStats

ray.cloudpickle.register_pickle_by_value(actor_module)

# Calls of one group run one after the other, in order; two groups' calls run at the same time. The
# groups are set here and not by decorators, because Ray has no types; and not by options of calls,
# because a driver that is Ray's client cannot send such options.
SENDING, RECEIVING = "sending", "receiving"
for _group, _methods in (
    (SENDING, (EngineActor.send,)),
    (RECEIVING, (EngineActor.describe, EngineActor.files, EngineActor.start, EngineActor.receive)),
):
    for _method in _methods:
        ray.method(concurrency_group=_group)(_method)
_LOST = (RayError, ConnectionError)  # the second one from a driver that is Ray's client


class ActorLost(Exception):
    """The actor, its process or its node is gone; one sentence names the cause."""


@dataclass(frozen=True, slots=True)
class Room:
    """The place that an actor asks for.

    Attributes:
        options: resources, in Ray's terms.
        node: id of the node where it is wanted; while that node lives, it is made there and nowhere
            else. None: any node.
    """

    options: Mapping[str, float]
    node: str | None


class RemoteActor:
    """An `EngineActor` that runs or waits for room; it ends with its driver at the latest."""

    def __init__(self, room: Room) -> None:
        place = room.node and NodeAffinitySchedulingStrategy(room.node, soft=True)
        grouped = ray.remote(max_restarts=0, concurrency_groups={SENDING: 1, RECEIVING: 1})
        made = grouped(EngineActor).options(**room.options, scheduling_strategy=place)
        try:
            self._handle = made.remote()
        except _LOST as error:
            raise ActorLost(_sentence(error)) from error

    def call(self, method: str, *arguments: Any) -> Any:
        """Make a call without waiting; raise ActorLost."""
        try:
            return getattr(self._handle, method).remote(*arguments)
        except _LOST as error:
            raise ActorLost(_sentence(error)) from error

    def poll(self, call: Any, seconds: float) -> tuple[Any] | None:
        """Wait for a call's result at most this long; None if there is none yet.

        Raises:
            ActorLost: the actor is gone, so there will be no result.
        """
        try:
            done, _ = ray.wait([call], timeout=seconds)
            return (ray.get(call),) if done else None
        except _LOST as error:
            raise ActorLost(_sentence(error)) from error

    def kill(self) -> None:
        """End its process, or its wait for room."""
        try:
            ray.kill(self._handle)
        except _LOST:
            return  # its node is gone already, or this driver's connection, with which it ends


def _sentence(error: Exception) -> str:
    """Return the line of Ray's message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "because" in line or "Error" in line]
    return (told or lines or [type(error).__name__])[-1]


logger = logging.getLogger(__name__)

WAITING = 10.0  # seconds for an actor, after which the wait is told
RECEIVE = 0.25  # seconds after which an actor without messages replies
# Replies cross a network, so they may be late for longer than a child's messages.
ACTOR_PATIENCE = Patience(silent=10.0, stopped=60.0)


@dataclass(frozen=True, slots=True)
class Hosting:
    """All that an actor needs to host the model.

    Attributes:
        model, revision: as in the settings; each node looks for the directory itself.
        files: the model's files that the driver has.
        start: returns the encoded `Start` for a node.
        first: this link says that all of them wait.
    """

    room: Room
    model: str
    revision: str | None
    files: Digests
    start: Callable[[NodeFacts], bytes]
    first: bool = False


class ActorLink(EngineLink):
    """The thread that has an actor made, checks its node, and reads; again after each loss.

    Args:
        hosting: the actor's arguments.
        owner: receives the engine's events.
        may_give_up: asked before an actor that failed too often is not made again.
        known: returns the limits of another engine that is ready, or None. While there is one, a
            link whose actor waits for room counts as started, so that the others can begin.
    """

    def __init__(
        self,
        hosting: Hosting,
        owner: ChildListener,
        may_give_up: Callable[[], bool],
        known: Callable[[], BackendLimits | None],
        patience: Patience = ACTOR_PATIENCE,
    ) -> None:
        super().__init__(owner, patience, "actor-link")
        self.node: NodeFacts | None = None  # None while there is no actor
        self._hosting = hosting
        self._may_give_up, self._known = may_give_up, known
        self._state: ActorState | None = None
        self._told = False  # that there is no actor yet
        self._open = False  # the engine's process is ready

    @property
    def healthy(self) -> bool:
        """True if the engine is ready and neither it nor its actor is silent."""
        return super().healthy and self._state is not None and self._state.healthy

    @property
    def stats(self) -> EngineStats:
        return self._stats  # whose age is the supervisor's

    @property
    def retry_after(self) -> int:
        """Whole seconds until an engine may be ready."""
        state = self._state
        return MAX_RETRY_AFTER if state is None else max(1, min(MAX_RETRY_AFTER, state.retry_after))

    def keep_running(self) -> None:
        """Run one actor after the other until `close`.

        Raises:
            ConfigError, EngineFailed: another actor would not help.
        """
        while True:
            began = self.started.done()
            error, served = self._run_once()
            if self._closing.is_set():
                return
            if not began and isinstance(error, ConfigError | EngineFailed):
                raise error
            self.failures = 1 if served >= self.patience.forgiven else self.failures + 1
            if self.failures >= self.patience.max_failures and self._may_give_up():
                raise EngineFailed(f"{self.failures} actors in a row failed, last: {error}")
            delay = self.patience.delay(self.failures)
            logger.warning("an actor ended: %s; Ray gets another one in %.1f s", error, delay)
            if self._closing.wait(delay):
                return

    def _run_once(self) -> tuple[Exception, float]:
        """Have one actor; return why it ended, and for how many seconds it served."""
        error: Exception = EngineFailed("the engine was closed")
        actor = None
        try:
            actor = RemoteActor(self._hosting.room)
            self._settle(actor)
            self._receive(actor)
        except (ActorLost, ProtocolError, ConfigError, EngineFailed) as failure:
            error = failure
        finally:
            served = 0.0 if self._ready_at is None else monotonic() - self._ready_at
            self._state, self._open, self.node, self._heartbeats = None, False, None, 0
            self._lost()
            if actor is not None:
                actor.kill()
        return error, served

    def _settle(self, actor: RemoteActor) -> None:
        """Wait for the actor, check its node, and start the engine's process there.

        Raises:
            ActorLost: it is gone, or `close` was called.
            ConfigError: the node cannot take part.
        """
        hosting = self._hosting
        self.node = NodeFacts(**self._result(actor, actor.call("describe"), self._join_later))
        self.node.check()
        wanted = hosting.model, hosting.revision
        found = self._result(actor, actor.call("files", *wanted))
        self.node.check_files(hosting.model, hosting.files, found)
        self._result(actor, actor.call("start", *wanted, hosting.start(self.node)))

    def _result(
        self, actor: RemoteActor, call: Any, meanwhile: Callable[[float], None] = lambda _: None
    ) -> Any:
        """Return a call's result; `meanwhile` gets the seconds that it has been waited for."""
        began = monotonic()
        while not self._closing.is_set():
            if found := actor.poll(call, TICK):
                return found[0]
            meanwhile(monotonic() - began)
        raise ActorLost("the engine was closed")

    def _join_later(self, waited: float) -> None:
        """Count as started while the actor waits for room, once another engine is ready."""
        limits = self._known()
        if limits is not None and not self.started.done():
            if not self.planned.done():  # an actor was lost after it had planned
                self.planned.set_result("an engine for which there is no room yet")
            self.started.set_result(limits)
        if limits is None and waited > WAITING and self._hosting.first and not self._told:
            self._told = True
            wanted = ", ".join(f"{name}={n}" for name, n in self._hosting.room.options.items())
            logger.warning("waiting for an actor with %s: Ray has started none yet", wanted)

    def _receive(self, actor: RemoteActor) -> None:
        """Take the actor's replies until `close`.

        Raises:
            ActorLost: it is gone or silent.
            ConfigError, EngineFailed: the engine ended for good.
        """
        call, before = actor.call("receive", RECEIVE), monotonic()
        while not self._closing.is_set():
            if reply := actor.poll(call, TICK):
                call = actor.call("receive", RECEIVE)  # before the answers are handled
                self._silence = 0.0
                self._take(actor, *reply[0])
            else:
                self._silence += passed(before)
            before = monotonic()
            if self._silence > self.patience.silent:
                self._owner.on_silent()
            if self._silence > self.patience.stopped:
                raise ActorLost(f"no reply for {self._silence:.0f} s")

    def _take(self, actor: RemoteActor, state: bytes, frames: list[bytes]) -> None:
        self._state = now = decode_state(state)
        self.loaded, self._stats, self._heartbeats = now.loaded, now.stats, now.heartbeats
        for frame in frames:
            self._take_message(decode_from_host(frame))
        if now.error is not None:
            raise raised(now.error, self._where)
        if now.about is not None and not self.planned.done():
            self.planned.set_result(now.about)
        if self._open and self._ready_at is None and now.limits is not None:
            self._join(actor, now.limits)

    def _take_message(self, message: Result | Failure | Opened | Silent | Lost) -> None:
        match message:
            case Opened():
                self._open = True
            case Silent():
                self._owner.on_silent()
            case Lost():
                self._open, self._ready_at = False, None
                self._owner.on_lost()
            case Result() | Failure():
                self._owner.on_answer(message)

    def _join(self, actor: RemoteActor, limits: BackendLimits) -> None:
        if self.started.done():
            _refuse_other(self.started.result(), limits, self._where)
            logger.warning("an engine joins on %s", self._where)
        self._ready_at = monotonic()

        def send(*makes: Make, now: bool = False) -> None:
            frames = [frame for make in makes if (frame := make()) is not None]
            try:
                actor.call("send", frames)
            except ActorLost:
                return  # the reading thread notices it, too, and fails what is in flight

        self._owner.on_ready(send)  # before anybody who waits for `started` goes on
        if not self.started.done():
            self.started.set_result(limits)

    @property
    def _where(self) -> str:
        return "a node" if self.node is None else self.node.name


def _refuse_other(first: BackendLimits, limits: BackendLimits, where: str) -> None:
    """Raise ConfigError unless scores of this engine can stand beside the first engine's."""
    same = same_model(first, limits) and first.page_size == limits.page_size
    if not same or first.identity != limits.identity:
        raise ConfigError(
            f"{where} serves {limits.identity}, the first engine {first.identity}; set the options "
            "that auto chooses differently"
        )
