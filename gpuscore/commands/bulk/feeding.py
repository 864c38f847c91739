"""Keeping the engine busy: rows grouped into requests, and many requests in flight, but not more
than a bound."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, groupby
from queue import Empty, SimpleQueue

from gpuscore.commands.bulk.tasks import Task, TextRow, Unit
from gpuscore.commands.bulk.work import Result
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import GpuscoreError, InternalError, Unavailable
from gpuscore.types.request import ScoreResult

GROUP_ROWS = 2048  # most rows of one request
# Most characters of one request, for each token of a batch: about two batches, so that results come
# in steps of seconds on a slow machine, too.
GROUP_TEXT = 8
ALIKE = 256  # first characters that rows of one request have in common, if others have them, too
# For each replica: full batches of tokens in flight, so that the engine always has a choice, and
# requests in flight.
BATCHES, MOST_REQUESTS = 8, 512
MOST_LOSSES = 3  # of engines, after which a request counts as their cause
SENT_TOGETHER = 32
PAUSE = 0.2  # seconds until a request that was lost is sent again


def grouped(rows: Iterable[TextRow], model: LoadedModel) -> Iterator[list[TextRow]]:
    """Yield the rows that go into one request each: rows that share a first text, or, to save
    requests, rows that each have a first text of their own; and of these, rows that begin alike."""
    builder, limits = model.prompts.builder, model.engine.limits
    # With a fixed cut, a row's bits depend on the text that its request shares, which must not
    # depend on the rows that are left.
    free_cut = not builder.backend.deterministic_chunk
    most_rows, most_text = min(GROUP_ROWS, builder.limits.max_items), GROUP_TEXT * limits.max_tokens
    ordered = sorted(rows)
    uses = Counter(row.first for row in ordered)

    def beginning(row: TextRow) -> tuple[str | None, str]:
        own = free_cut and uses[row.first] == 1
        text = row.first + row.rest if own else row.rest
        return None if own else row.first, text[:ALIKE] if len(text) > ALIKE else ""

    group: list[TextRow] = []
    first, mixed, size = None, False, 0
    for (shared, start), run in groupby(ordered, beginning):
        alike = list(run)
        joins = mixed and shared == first and (not start or len(alike) == 1)
        if group and not joins:
            yield group
            group, size = [], 0
        first, mixed = shared, not start or len(alike) == 1
        for row in alike:
            length = len(row.rest) + (len(row.first) if shared is None else 0)
            if group and (len(group) == most_rows or size + length > most_text):
                yield group
                group, size = [], 0
            group.append(row)
            size += length
    if group:
        yield group


class Feeder:
    """The loop that scores rows with an engine.

    Requests that the engine loses are sent again: scoring has no effect but its result. A request
    during which MOST_LOSSES engines were lost is divided; a single row to which that happens is
    bad. Each row is settled exactly once.

    Args:
        model: with the engine.
        task: makes requests of rows.
        settle: called with the results of some rows.
    """

    def __init__(
        self,
        model: LoadedModel,
        task: Task,
        settle: Callable[[Sequence[TextRow], Sequence[Result]], None],
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

    def _fill(self, made: Iterator[Unit]) -> bool:
        """Send requests until enough are in flight; return False if there are no more rows."""
        taken = True
        while taken and self._room:
            units: list[Unit] = []
            while len(units) < SENT_TOGETHER and self._room:
                unit = self._again.popleft() if self._again else next(made, None)
                if unit is None:
                    self._send(units)
                    return False
                if unit.request is None:
                    self._settle(unit.rows, unit.results)
                else:
                    units.append(unit)
                    self._tokens += unit.tokens
            taken = self._send(units)
        return True

    @property
    def _room(self) -> bool:
        """True if one more request may be in flight, whatever its size."""
        return len(self._flying) < self._most_requests and self._tokens < self._most_tokens

    def _send(self, units: list[Unit]) -> bool:
        """Send requests; return False if no engine runs for now."""
        if not self._engine.alive:  # until it is started again
            self._tokens -= sum(unit.tokens for unit in units)
            self._again += units
            return False
        futures = self._engine.score_all([unit.request for unit in units if unit.request])
        for unit, future in zip(units, futures, strict=True):
            self._flying[future] = unit
            future.add_done_callback(self._done.put)
        return True

    def _collect(self) -> None:
        """Settle answered requests; wait for an answer, or shortly if no engine runs."""
        try:
            wait = bool(self._flying or self._again)
            self._take(self._done.get(wait, PAUSE if self._again else None))
            while True:
                self._take(self._done.get(block=False))
        except Empty:
            return

    def _take(self, answer: "Future[ScoreResult] | Exception") -> None:
        if isinstance(answer, Exception):
            raise answer
        unit, error = self._flying.pop(answer), answer.exception()
        if error is None:
            self._tokens -= unit.tokens
            self._settle(unit.rows, self._task.results(unit, answer.result()))
        elif isinstance(error, GpuscoreError):
            lost = isinstance(error, Unavailable)  # with its engine
            self._gone(replace(unit, losses=unit.losses + lost), error)
        else:
            raise error

    def _gone(self, unit: Unit, error: GpuscoreError) -> None:
        """Take back a request without a result, to send it again, or smaller ones in its place."""
        self._tokens -= unit.tokens
        if not isinstance(error, Unavailable):
            self._again += self._task.failed(unit, error)
        elif unit.losses < MOST_LOSSES:
            self._again.append(unit)
        else:
            what = f"the engine was lost {unit.losses} times while it had this row"
            self._again += self._task.failed(unit, InternalError(what))
