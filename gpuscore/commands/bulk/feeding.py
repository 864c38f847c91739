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
PAUSE = 0.2  # seconds until a request that was lost is sent again


def grouped(rows: Sequence[TextRow], task: Task) -> Iterator[Sequence[TextRow]]:
    """Yield the rows that go into one request each: rows that share a query, or, to save requests,
    rows that each have a query of their own; and of these, rows that begin alike."""
    builder, limits = task.model.prompts.builder, task.model.engine.limits
    most_rows, most_text = min(GROUP_ROWS, builder.limits.max_items), GROUP_TEXT * limits.max_tokens
    # With a fixed cut, a row's bits depend on the query that its request shares, which must not
    # depend on the rows that are left.
    mixes = not builder.backend.deterministic_chunk
    uses = Counter(row.query for row in rows)

    texts = {}  # the query that a row's request shares, how the rest begins, and its length
    for row in rows:
        own = mixes and uses[row.query] == 1
        query, rest = ("", row.query + row.item) if own else (row.query, row.item)
        texts[row] = query, rest[:ALIKE] if len(rest) > ALIKE else "", len(rest)
    alike = Counter((query, start) for query, start, _ in texts.values())

    def shared(row: TextRow) -> tuple[str, str]:
        query, start, _ = texts[row]
        return query, start if alike[query, start] > 1 else ""

    for _, run in groupby(sorted(rows, key=lambda row: (shared(row), row)), shared):
        group: list[TextRow] = []
        size = 0
        for row in run:
            *_, length = texts[row]
            if group and (len(group) == most_rows or size + length > most_text):
                yield group
                group, size = [], 0
            group.append(row)
            size += length
        yield group


class Feeder:
    """The loop that scores rows with an engine.

    Requests that the engine loses are sent again: scoring has no effect but its result. A request
    during which MOST_LOSSES engines were lost is divided; a single row to which that happens is
    bad. Each row is settled exactly once.

    Args:
        task: makes units of rows, for its model.
        settle: called with the results of some rows.
    """

    def __init__(
        self, task: Task, settle: Callable[[Sequence[TextRow], Sequence[Result]], None]
    ) -> None:
        model = task.model
        self._engine, self._task, self._settle = model.engine, task, settle
        self._most_tokens = BATCHES * model.replicas * model.engine.limits.max_tokens
        self._most_requests = MOST_REQUESTS * model.replicas
        self._flying: dict[Future[ScoreResult], Unit] = {}
        self._tokens = 0  # in flight
        self._again: deque[Unit] = deque()
        self._done: SimpleQueue[Future[ScoreResult] | Exception] = SimpleQueue()
        watcher = threading.Thread(target=self._watch, args=(model.wait_ended,), daemon=True)
        watcher.start()

    def _watch(self, wait_ended: Callable[[], None]) -> None:
        """Pass on that the engine has failed for good; runs in a thread."""
        try:
            wait_ended()
        except Exception as error:  # noqa: BLE001  (`run` raises it)
            self._done.put(error)

    def run(self, groups: Iterable[Sequence[TextRow]]) -> None:
        """Score all groups of rows.

        Raises:
            EngineFailed: the engine cannot be kept running.
        """
        made = chain.from_iterable(map(self._task.units, groups))
        more = True
        while more or self._flying or self._again:
            while len(self._flying) >= self._most_requests or self._tokens >= self._most_tokens:
                self._collect()
            unit = self._again.popleft() if self._again else next(made, None)
            more = unit is not None
            if unit is not None:
                self._send(unit)
            elif self._flying:
                self._collect()

    def _send(self, unit: Unit) -> None:
        """Send a unit; if no engine runs for now, wait shortly."""
        if unit.request is None:
            self._take(unit, None)
        elif self._engine.alive:
            (future,) = self._engine.score_all([unit.request])
            self._flying[future] = unit
            self._tokens += unit.tokens
            future.add_done_callback(self._done.put)
        else:  # until it is started again
            self._again.append(unit)
            self._collect(PAUSE)

    def _collect(self, seconds: float | None = None) -> None:
        """Wait for an answer, at most so long, and settle its rows."""
        try:
            answer = self._done.get(timeout=seconds)
        except Empty:
            return
        if isinstance(answer, Exception):
            raise answer
        unit = self._flying.pop(answer)
        self._tokens -= unit.tokens
        self._take(unit, answer)

    def _take(self, unit: Unit, answer: "Future[ScoreResult] | None") -> None:
        try:
            results = unit.read(None if answer is None else answer.result())
        except GpuscoreError as error:
            lost = isinstance(error, Unavailable)  # with its engine
            self._gone(replace(unit, losses=unit.losses + lost), error)
        else:
            self._settle(unit.rows, results)

    def _gone(self, unit: Unit, error: GpuscoreError) -> None:
        """Note what is sent in the place of a unit without results: itself, or smaller ones."""
        if not isinstance(error, Unavailable):
            self._again += unit.failed(error)
        elif unit.losses < MOST_LOSSES:
            self._again.append(unit)
        else:
            what = f"the engine was lost {unit.losses} times while it had this row"
            self._again += unit.failed(InternalError(what))
