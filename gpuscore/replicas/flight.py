"""One request on its way through the replicas."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from gpuscore.request import ScoreRequest, ScoreResult


@dataclass(slots=True, eq=False)
class Flight:
    """A request, the future of its answer, and the results of its parts so far."""

    request: ScoreRequest
    future: "Future[ScoreResult]" = field(default_factory=Future)
    parts: "list[Part]" = field(default_factory=list)
    losses: int = 0  # engines that were lost while they had a part of it

    @property
    def results(self) -> list[ScoreResult] | None:
        """The results of all parts, in order; None while one is missing."""
        results = [part.result for part in self.parts if part.result is not None]
        return results if len(results) == len(self.parts) else None

    def give_up(self) -> None:
        """Cancel what replicas have of it."""
        for part in self.parts:
            if part.inner is not None:
                part.inner.cancel()


@dataclass(slots=True, eq=False)
class Part:
    """Items of a request that one replica scores."""

    flight: Flight
    request: ScoreRequest
    replica: int
    tokens: int  # that the replica probably computes for it
    first: int = 0  # number of its first item in the whole request
    inner: "Future[ScoreResult] | None" = None  # at the replica
    result: ScoreResult | None = None
