"""Data of all fronts: shared counts that limits are compared with, and sums of metrics."""

import mmap
from collections.abc import Collection
from dataclasses import dataclass, field
from time import monotonic

from gpuscore.engine import admission
from gpuscore.engine.admission import Counts
from gpuscore.server.http import gate
from gpuscore.server.observe.sums import Samples, Snapshot, add

LATE = 1.0  # seconds after which a front's last report is taken instead of an answer


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


@dataclass(slots=True)
class Question:
    """A front's question for the sums, until all others have reported."""

    asker: int
    number: int  # the asker's
    waits_for: set[int]
    until: float = field(default_factory=lambda: monotonic() + LATE)


class Totals:
    """The last report of each front, and the sum of the reports of ended fronts.

    What a front has counted since its last report is lost with it if it is killed.
    """

    def __init__(self) -> None:
        self._past: Samples = {}
        self._last: dict[int, Snapshot] = {}
        self._questions: dict[int, Question] = {}
        self._asked = 0

    def report(self, front: int, snapshot: Snapshot, question: int | None = None) -> None:
        """Note a front's report, which may answer a question of `ask`."""
        self._last[front] = snapshot
        if question in self._questions:
            self._questions[question].waits_for.discard(front)

    def lost(self, front: int) -> None:
        """Keep the counts of a front that has ended."""
        add(self._past, self._last.pop(front, Snapshot()).growing)
        self._questions = {
            n: question for n, question in self._questions.items() if question.asker != front
        }
        for question in self._questions.values():
            question.waits_for.discard(front)

    def ask(self, front: int, number: int, others: Collection[int]) -> int:
        """Note a front's question; return its number, which the other fronts are asked with."""
        self._asked += 1
        self._questions[self._asked] = Question(front, number, set(others))
        return self._asked

    def answers(self) -> "list[tuple[int, int, Samples]]":
        """Return the front, the number and the answer of each question that can be answered now."""
        now = monotonic()
        done = [n for n, q in self._questions.items() if not q.waits_for or now >= q.until]
        asked = [self._questions.pop(number) for number in done]
        return [
            (question.asker, question.number, self._others(question.asker)) for question in asked
        ]

    def _others(self, asker: int) -> Samples:
        sums = dict(self._past)
        for front, snapshot in self._last.items():
            if front != asker:
                add(sums, snapshot.growing)
                add(sums, snapshot.present)
        return sums
