"""One request on its way through the replicas."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from gpuscore.engine.trees import DistinctItems, distinct_items
from gpuscore.processes.replicas.parts import join
from gpuscore.types.request import ScoreRequest, ScoreResult


@dataclass(slots=True, eq=False)
class Flight:
    """A request, the future of its answer, and the results of its parts so far."""

    request: ScoreRequest
    future: "Future[ScoreResult]" = field(default_factory=Future)
    parts: "list[Part]" = field(default_factory=list)
    losses: int = 0  # engines that were lost while they had a part of it
    distinct: DistinctItems | None = field(init=False)

    def __post_init__(self) -> None:
        self.distinct = distinct_items(self.request)

    @property
    def divided(self) -> ScoreRequest:
        """The request that is divided: of equal items the first, so that they have one score."""
        return self.request if self.distinct is None else self.distinct.request

    def whole(self, results: Sequence[ScoreResult]) -> ScoreResult:
        """Return the answer to the request of those to its parts, in order."""
        result = join(results)
        return result if self.distinct is None else self.distinct.spread(result)

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

    @property
    def places(self) -> Sequence[int]:
        """The caller's items that are the part's."""
        items = range(self.first, self.first + len(self.request.item_ids))
        distinct = self.flight.distinct
        return items if distinct is None else [*map(distinct.first, items)]
