"""A rate: tokens per second, averaged over the last seconds of work."""

import math

RATE_SECONDS = 5.0  # of work, after which its weight in the average has fallen to 1/e


class Rate:
    """A smoothed rate in tokens per second; one thread adds, any thread may read `value`."""

    def __init__(self) -> None:
        self.value = 0.0  # unknown
        self._done = self._busy = 0.0

    def add(self, done: float, seconds: float) -> None:
        """Add `done` tokens computed in `seconds`."""
        kept = math.exp(-seconds / RATE_SECONDS)
        self._busy = kept * self._busy + seconds
        self._done = kept * self._done + done
        self.value = self._done / self._busy if self._busy > 0 else 0.0
