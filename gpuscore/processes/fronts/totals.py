"""The sums of what all fronts have counted, kept by the parent."""

from collections.abc import Collection
from dataclasses import dataclass, field
from time import monotonic

from gpuscore.server.observe.sums import Samples, Snapshot, add

LATE = 1.0  # seconds after which a front's last report is taken instead of an answer


@dataclass(slots=True)
class Question:
    """A front's question for the sums, until all others have reported."""

    asker: int
    number: int  # the asker's
    waits_for: set[int]
    until: float = field(default_factory=lambda: monotonic() + LATE)


class Totals:
    """The last report of each front, and the sum of those that have ended.

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
        """Keep what a front has counted: it has ended."""
        add(self._past, self._last.pop(front, Snapshot()).growing)
        self._questions = {n: one for n, one in self._questions.items() if one.asker != front}
        for question in self._questions.values():
            question.waits_for.discard(front)

    def ask(self, front: int, number: int, others: Collection[int]) -> int:
        """Note a front's question; return the number with which the others are asked."""
        self._asked += 1
        self._questions[self._asked] = Question(front, number, set(others))
        return self._asked

    def answers(self) -> "list[tuple[int, int, Samples]]":
        """Return the front, the number and the answer of each question that can be answered now."""
        now = monotonic()
        done = [n for n, q in self._questions.items() if not q.waits_for or now >= q.until]
        asked = [self._questions.pop(number) for number in done]
        return [(one.asker, one.number, self._others(one.asker)) for one in asked]

    def _others(self, asker: int) -> Samples:
        sums = dict(self._past)
        for front, snapshot in self._last.items():
            if front != asker:
                add(sums, snapshot.growing)
                add(sums, snapshot.present)
        return sums
