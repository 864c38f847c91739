"""The memory that all fronts share: what limits are compared with, and the engines' state."""

import mmap

from gpuscore.engine import admission
from gpuscore.engine.admission import Counts
from gpuscore.server.http import gate


class Board:
    """A row of counts for each front, and for each engine the seconds until it may be ready.

    Args:
        fronts: processes that share it.
        engines: of all models.
        models: that are served.

    Make it before the processes that share it are forked. The system frees it with the last of
    them.
    """

    def __init__(self, fronts: int, engines: int, models: int = 1) -> None:
        self.fronts, self._engines = fronts, engines
        self._width = gate.PLACES + (engines + models) * admission.PLACES
        self._rows = fronts * self._width
        cells = memoryview(mmap.mmap(-1, 8 * (self._rows + engines))).cast("q")
        self._table, self._waits = cells[: self._rows], cells[self._rows :]

    @property
    def requests(self) -> int:
        """Number of requests in flight in all fronts."""
        return self.gate(0).total(gate.REQUESTS)

    def gate(self, front: int) -> Counts:
        """Return the counts of a front's `Gate`."""
        return Counts(self._table, self._width, front)

    def backlog(self, front: int, engine: int) -> Counts:
        """Return the counts of a front's requests to an engine."""
        first = gate.PLACES + engine * admission.PLACES
        return Counts(self._table, self._width, front, first)

    def whole_backlog(self, front: int, model: int) -> Counts:
        """Return the counts of a front's requests to all engines of a model together."""
        return self.backlog(front, self._engines + model)

    def clear(self, front: int) -> None:
        """Forget the counts of a front that has ended."""
        for cell in range(front * self._width, (front + 1) * self._width):
            self._table[cell] = 0

    def retry_after(self, engine: int) -> int:
        """Return whole seconds until a lost engine may be ready."""
        return max(1, self._waits[engine])

    def set_retry_after(self, engine: int, seconds: int) -> None:
        self._waits[engine] = seconds
