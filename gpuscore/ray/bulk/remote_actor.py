"""Calls of an actor, with Ray's errors as one kind of loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpuscore.ray.bulk import actor as actor_module
from gpuscore.ray.bulk.actor import EngineActor

ray.cloudpickle.register_pickle_by_value(actor_module)

# Calls of one group run one after the other, in order; those of two groups at the same time. Noted
# here and not by decorators, because Ray has no types; and not by options of the calls, because a
# driver that is Ray's client cannot send those.
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
            ActorLost: there will be none.
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
