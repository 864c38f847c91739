"""The runner's counters of batches, tokens and failures."""

from bisect import bisect_left

from gpuscore.types.batch import PackedBatch
from gpuscore.types.stats import BATCH_ITEMS, BATCH_TOKENS, EngineCounters, SizeCounts


class Tally:
    """Counters that the engine's thread writes and any thread may read.

    A reader may see one counter before a batch and another one after it.
    """

    def __init__(self) -> None:
        self.oom_retried = 0
        self.oom_failed = 0
        self.nonfinite_rows = 0
        self._batches = 0
        self._tokens = _SizeCount(BATCH_TOKENS)
        self._items = _SizeCount(BATCH_ITEMS)

    def collected(self, batch: PackedBatch) -> None:
        """Count a collected batch, its tokens and its scored rows."""
        self._batches += 1
        self._tokens.add(batch.num_tokens)
        self._items.add(len(batch.score_rows))

    @property
    def computed_tokens(self) -> int:
        return self._tokens.total

    def counters(self, cached_tokens: int, evicted_pages: int) -> EngineCounters:
        """Return all counters, with the two that the scheduler and its pages keep."""
        tokens = self._tokens.sizes()
        return EngineCounters(
            batches=self._batches,
            computed_tokens=tokens.total,
            cached_tokens=cached_tokens,
            evicted_pages=evicted_pages,
            oom_retried=self.oom_retried,
            oom_failed=self.oom_failed,
            nonfinite_rows=self.nonfinite_rows,
            batch_tokens=tokens,
            batch_items=self._items.sizes(),
        )


class _SizeCount:
    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, size: int) -> None:
        self._counts[bisect_left(self._bounds, size)] += 1
        self.total += size

    def sizes(self) -> SizeCounts:
        return SizeCounts(tuple(self._counts), self.total)
