"""How fast something is done: a mean over the last seconds of work."""

import math

RATE_SECONDS = 5.0  # of work; what is longer ago counts less


class Rate:
    """Tokens per second, smoothed; one thread adds, any may read `value`."""

    def __init__(self) -> None:
        self.value = 0.0  # until something was done
        self._done = self._busy = 0.0

    def add(self, done: float, seconds: float) -> None:
        kept = math.exp(-seconds / RATE_SECONDS)
        self._busy = kept * self._busy + seconds
        self._done = kept * self._done + done
        self.value = self._done / self._busy if self._busy > 0 else 0.0
