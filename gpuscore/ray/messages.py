"""The messages between the HTTP layer and engines' replicas, like `processes.worker.wire`.

They go to other machines, whose clocks differ. So they hold the time that a request has left in the
place of its deadline, and the model that it was made for.
"""

from functools import cache
from hashlib import blake2b
from time import monotonic
from typing import TypeVar

from msgspec.structs import replace

from gpuscore.processes.worker.wire import (
    Failure,
    Message,
    Result,
    Seconds,
    check_request,
    decoder,
)
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest
from gpuscore.types.stats import ReplicaState

MessageT = TypeVar("MessageT", bound=Message)
_decoder = cache(decoder)


class Ask(Message, frozen=True):
    """A request to a replica; `model` is the `fingerprint` of the limits that it was made for."""

    request: ScoreRequest
    seconds: Seconds  # until its deadline
    model: str


class OtherModel(Message, frozen=True):
    """The outcome at a replica whose engine has another model than the request was made for."""


class HostReply(Message, frozen=True):
    """A replica's answer to an `Ask`, and its state, under its name in Ray's own logs."""

    outcome: Result | Failure | OtherModel
    state: ReplicaState


class Facts(Message, frozen=True):
    """A loaded model; `version` is the version of the settings that the replica started with."""

    limits: BackendLimits
    about: str
    version: str
    state: ReplicaState


def fingerprint(limits: BackendLimits) -> str:
    """Return a digest of all that a request depends on: models with equal digests take it."""
    names = ("identity", "vocab_rows", "classes", "max_model_len", "page_size")
    told = repr([getattr(limits, name) for name in names])
    return blake2b(told.encode(), digest_size=16).hexdigest()


def ask(request: ScoreRequest, model: str) -> Ask:
    """Return the message for a request, which must have a deadline."""
    left = (request.deadline or 0.0) - monotonic()
    return Ask(replace(request, deadline=None), max(0.0, left), model)


def asked(message: Ask, limits: BackendLimits) -> ScoreRequest:
    """Return the request, with a deadline on this machine's clock.

    Raises:
        ProtocolError: sizes disagree, or the model lacks an id.
    """
    request = check_request(message.request, limits)
    return replace(request, deadline=monotonic() + message.seconds)


def decode(frame: bytes, kind: type[MessageT]) -> MessageT:
    """Decode a message; raise ProtocolError if the frame is not one of this kind."""
    message: MessageT = _decoder(kind)(frame)
    return message
