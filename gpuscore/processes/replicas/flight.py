"""One request on its way through the replicas: its parts, and the results put together again."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gpuscore.engine.trees import DistinctItems, distinct_items
from gpuscore.types.request import ScoreRequest, ScoreResult, Timings

ScalarT = TypeVar("ScalarT", bound=np.generic)


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
        """The request that is divided, without repeated items: equal items get one score."""
        return self.request if self.distinct is None else self.distinct.request

    def whole(self, results: Sequence[ScoreResult]) -> ScoreResult:
        """Return the request's answer, made from the answers to its parts, in order."""
        result = join(results)
        return result if self.distinct is None else self.distinct.spread(result)

    @property
    def results(self) -> list[ScoreResult] | None:
        """The results of all parts, in order; None while one is missing."""
        results = [part.result for part in self.parts if part.result is not None]
        return results if len(results) == len(self.parts) else None

    def give_up(self) -> None:
        """Cancel the parts of the request that replicas have."""
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
        """The numbers of the part's items in the caller's request."""
        items = range(self.first, self.first + len(self.request.item_ids))
        distinct = self.flight.distinct
        return items if distinct is None else [*map(distinct.first, items)]


def split(request: ScoreRequest, sizes: Sequence[int]) -> list[ScoreRequest]:
    """Divide a request's items, in their order, into parts of about these numbers of tokens.

    Returns:
        As many parts as sizes, each with at least one item; fewer if there are fewer items.
    """
    if len(sizes) == 1:
        return [request]
    ends = np.cumsum([*map(len, request.item_ids)])
    wanted = np.array(list(accumulate(sizes))[:-1])
    cuts = np.searchsorted(ends, wanted * (ends[-1] / sum(sizes)), side="right")
    bounds = sorted({0, *np.clip(cuts, 1, len(ends) - 1).tolist(), len(ends)})
    return [_part(request, *some) for some in zip(bounds, bounds[1:], strict=False)]


def _part(request: ScoreRequest, start: int, stop: int) -> ScoreRequest:
    """Return the request with the items `start` to `stop - 1` only."""
    return replace(
        request,
        item_ids=request.item_ids[start:stop],
        label_ids=request.label_ids[start:stop],
        # The rows of a query that is scored are computed once, with the first part.
        query_labels=None if start else request.query_labels,
    )


def join(results: Sequence[ScoreResult]) -> ScoreResult:
    """Put the results of all parts together, in the order of `split`.

    The tokens add up; the timings come from the part that took longest.
    """
    if len(results) == 1:
        return results[0]
    return ScoreResult(
        label_logits=tuple(row for result in results for row in result.label_logits),
        lse=_together([result.lse for result in results]),
        top_ids=_together([result.top_ids for result in results]),
        top_logits=_together([result.top_logits for result in results]),
        computed_tokens=sum(result.computed_tokens for result in results),
        timings=max((result.timings for result in results), key=_seconds),
    )


def _together(arrays: Sequence[NDArray[ScalarT] | None]) -> NDArray[ScalarT] | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None


def _seconds(timings: Timings) -> float:
    return timings.queue + timings.batch + timings.device
