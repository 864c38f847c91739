"""What a dialect is to the rest of the server."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from gpuscore.server.observe.record import RequestRecord
from gpuscore.server.service import RequestContext, ScoringService

BodyT = TypeVar("BodyT")


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyT]):
    """Bodies that are sent with POST to some paths, and what answers them.

    Args:
        paths: where.
        summary: a few words, for /docs.
        description: a sentence, for /docs.
        bodies: what may be sent, for /docs.
        answers: what comes back, for /docs; nothing for a route that is always refused.
        decode: a body as sent to one that is checked; raises InvalidRequest.
        answer: the answer as JSON; raises GpuscoreError.
        example: a body that the demo model answers, for /docs.
    """

    paths: tuple[str, ...]
    summary: str
    description: str
    bodies: tuple[type[msgspec.Struct], ...]
    answers: tuple[Any, ...]
    decode: Callable[[bytes, RequestRecord], BodyT]
    answer: Callable[[ScoringService, BodyT, RequestContext], Coroutine[Any, Any, bytes]]
    example: dict[str, Any]
