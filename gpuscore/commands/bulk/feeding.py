"""Keeping the engine busy: many requests in flight, but not more than a bound."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from queue import Empty, SimpleQueue

from gpuscore.commands.bulk.rows import Settled, TextRow
from gpuscore.commands.bulk.tasks import Task, Unit
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import GpuscoreError, InternalError, Overloaded, Unavailable
from gpuscore.types.request import ScoreResult

# For each replica: full batches of tokens in flight, so that the engine always has a choice, and
# requests in flight.
BATCHES, MOST_REQUESTS = 8, 512
MOST_LOSSES = 3  # of engines, after which a request counts as their cause
SENT_TOGETHER = 32
PAUSE = 0.2  # seconds until a request that was refused for now is sent again


@dataclass(frozen=True, slots=True)
class CountedRows:
    """The outcome of some rows, with the tokens that it took."""

    settled: Settled
    rows: int
    prompt_tokens: int = 0
    computed_tokens: int = 0


class Feeder:
    """The loop that scores rows with an engine.

    Requests that the engine refuses for now, or loses, are sent again: scoring has no effect but
    its result. A request during which MOST_LOSSES engines were lost is divided; a single row to
    which that happens is bad. Each row is settled exactly once.

    Args:
        model: with the engine.
        task: makes requests of rows.
        settle: called with each outcome.
    """

    def __init__(
        self, model: LoadedModel, task: Task, settle: Callable[[CountedRows], None]
    ) -> None:
        self._engine, self._task, self._settle = model.engine, task, settle
        self._most_tokens = BATCHES * model.replicas * model.engine.limits.max_tokens
        self._most_requests = MOST_REQUESTS * model.replicas
        self._flying: dict[Future[ScoreResult], Unit] = {}
        self._tokens = 0  # in flight
        self._again: deque[Unit] = deque()
        self._done: SimpleQueue[Future[ScoreResult] | Exception] = SimpleQueue()
        watcher = threading.Thread(target=self._watch, args=(model.wait_ended,), daemon=True)
        watcher.start()

    def run(self, groups: Iterable[Sequence[TextRow]]) -> None:
        """Score all groups of rows.

        Raises:
            EngineFailed: the engine cannot be kept running.
        """
        made = chain.from_iterable(map(self._task.units, groups))
        more = True
        while more or self._flying or self._again:
            more = self._fill(made) and more
            self._collect()

    def _watch(self, wait_ended: Callable[[], None]) -> None:
        """Pass on that the engine has failed for good; runs in a thread."""
        try:
            wait_ended()
        except Exception as error:  # noqa: BLE001  (`run` raises it)
            self._done.put(error)

    def _fill(self, made: Iterator[Unit | Settled]) -> bool:
        """Send requests until enough are in flight; return False if there are no more rows."""
        refused = False
        while not refused and self._room:
            units: list[Unit] = []
            while len(units) < SENT_TOGETHER and self._room:
                if self._again:
                    self._take(self._again.popleft(), units)
                    continue
                part = next(made, None)
                if part is None:
                    self._send(units)
                    return False
                if isinstance(part, Unit):
                    self._take(part, units)
                else:
                    self._settle(CountedRows(part, 1))
            refused = self._send(units)
        return True

    @property
    def _room(self) -> bool:
        """True if one more request may be in flight, whatever its size."""
        return len(self._flying) < self._most_requests and self._tokens < self._most_tokens

    def _take(self, unit: Unit, units: list[Unit]) -> None:
        units.append(unit)
        self._tokens += unit.request.num_tokens

    def _send(self, units: list[Unit]) -> bool:
        """Send requests; return True if the engine takes no more for now."""
        refused = False
        outcomes = self._engine.score_all([unit.request for unit in units])
        for unit, outcome in zip(units, outcomes, strict=True):
            if isinstance(outcome, Future):
                self._flying[outcome] = unit
                outcome.add_done_callback(self._done.put)
            else:
                refused |= self._gone(unit, outcome)
        return refused

    def _collect(self) -> None:
        """Settle answered requests; wait for an answer, or shortly if requests were refused."""
        try:
            wait = bool(self._flying) or bool(self._again)
            self._take_answer(self._done.get(wait, PAUSE if self._again else None))
            while True:
                self._take_answer(self._done.get(block=False))
        except Empty:
            return

    def _take_answer(self, answer: "Future[ScoreResult] | Exception") -> None:
        if isinstance(answer, Exception):
            raise answer
        unit = self._flying.pop(answer)
        error = answer.exception()
        if error is None:
            self._tokens -= unit.request.num_tokens
            result = answer.result()
            settled = self._task.settle(unit, result)
            tokens = unit.request.num_prompt_tokens
            self._settle(CountedRows(settled, len(unit.rows), tokens, result.computed_tokens))
        elif isinstance(error, Unavailable):
            self._lost(replace(unit, losses=unit.losses + 1), error)
        elif isinstance(error, GpuscoreError):
            self._gone(unit, error)
        else:
            raise error

    def _lost(self, unit: Unit, error: Unavailable) -> None:
        """Take back a request whose engine was lost."""
        if unit.losses < MOST_LOSSES:
            self._gone(unit, error)
            return
        self._tokens -= unit.request.num_tokens
        what = InternalError(f"the engine was lost {unit.losses} times while it had this row")
        self._divide(unit, what)

    def _gone(self, unit: Unit, error: GpuscoreError) -> bool:
        """Take back a request without a result; return True if it may be sent again as it is."""
        self._tokens -= unit.request.num_tokens
        if isinstance(error, Overloaded | Unavailable):
            self._again.append(unit)
            return True
        self._divide(unit, error)
        return False

    def _divide(self, unit: Unit, error: GpuscoreError) -> None:
        """Send smaller requests in place of a failed request, or settle its only row."""
        for part in self._task.failed(unit, error):
            if isinstance(part, Unit):
                self._again.append(part)
            else:
                self._settle(CountedRows(part, 1))
