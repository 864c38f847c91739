"""Scoring rows, as the dialects of the server do it: rows become requests, many of which are in
flight, but not more than a bound; results become scores or answers, which are kept.

Rows of a table become bodies of /v1/score or /v1/classify. Lines of a file of requests have
OpenAI's batch format, as vLLM's run-batch takes it: {"custom_id", "method", "url", "body"}.
"""

import hashlib
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, groupby
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from gpuscore.commands.bulk.inputs import Input, Row, decoded
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.work import Result, WorkFolder
from gpuscore.dialects.dialect import PreparedBody, answered_name, choose
from gpuscore.dialects.served import ModelTable, ServedModel
from gpuscore.dialects.table import DIALECT_OF, error_json
from gpuscore.dialects.wire import FailedItem
from gpuscore.errors import ConfigError, GpuscoreError, InternalError, NotFound, Unavailable
from gpuscore.types.item_errors import renumbered
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import scored_places

_PLACE = re.compile(r"\b(documents|input|items|queries)\[\d+\]")  # of a row in its request
OK, ID_DIGITS = 200, 24
GROUP_ROWS = 2048  # most rows of one request
# Most characters of one request, for each token of a batch: about two batches, so that results come
# in steps of seconds on a slow machine, too.
GROUP_TEXT = 8
ALIKE = 256  # first characters that rows of one request have in common, if others have them, too
BATCHES = 8  # full batches of tokens in flight, for each replica, so that it always has a choice
MOST_LOSSES = 3  # of engines, after which a request counts as their cause
PAUSE = 0.2  # seconds until a request that was lost is sent again
KEPT_EVERY = 10.0  # seconds of scoring


class TextRow(NamedTuple):
    """A row's query and item, or a request's body and its whole line; its part and place there."""

    query: str
    item: str
    part: int
    place: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Some rows on their way.

    Attributes:
        made: the request, or why it cannot be made.
        losses: engines that had it in flight.
    """

    rows: Sequence[TextRow]
    record: RequestRecord
    made: PreparedBody[Any] | GpuscoreError
    losses: int = 0

    @property
    def request(self) -> ScoreRequest | None:
        """The request for the engine; None if it need not be asked."""
        return None if isinstance(self.made, GpuscoreError) else self.made.request

    def answer(self, result: ScoreResult | None) -> bytes:
        """Return the server's answer; raise GpuscoreError if there is no request."""
        if isinstance(self.made, GpuscoreError):
            raise self.made
        self.made.result = result
        return b"".join(DIALECT_OF[self.record.route].encode(self.made))


class Steps:
    """The server's steps before the engine, with one model."""

    def __init__(self, options: BatchOptions, served: ServedModel) -> None:
        self.options, self.model = options, served.ready()
        self._models = ModelTable([served])

    def unit(self, rows: Sequence[TextRow], record: RequestRecord, body: bytes) -> Unit:
        try:
            if (dialect := DIALECT_OF.get(record.route)) is None:
                raise NotFound("no such path")
            checked = dialect.decode(body, record, None)
            name = answered_name(choose(self._models, dialect, checked), checked)
            prepared = dialect.prepare(self.model, checked)
        except GpuscoreError as error:
            return Unit(rows, record, error)
        prepared.model, prepared.record = name, record
        return Unit(rows, record, prepared)


class TableTask(Steps):
    """The scores of a table's rows.

    Raises:
        ConfigError: there are no labels and no prompt family, or the family does not fit the
            options.
        GpuscoreError: the labels are not valid for the model.
    """

    def __init__(self, options: BatchOptions, served: ServedModel) -> None:
        super().__init__(options, served)
        prompts = None if options.labels else self.model.prompts.family
        self._family = family = None if prompts is None else prompts.family
        if family is None:
            if options.labels is None and self.model.default_labels is None:
                raise ConfigError("--labels is missing: the model is of no known prompt family")
            for unit in self.units([]):
                unit.answer(None)  # checks the labels
        elif family.ranks and options.query_column is None:
            raise ConfigError(f"--query-column is missing: prompts of {family.name} need a query")
        elif options.query_column and not family.ranks:
            raise ConfigError(f"--query-column: {family.name} judges single texts here")

    def texts(self, row: Row) -> tuple[str, str] | str:
        """Return the texts of a row, or what is wrong with it."""
        options, fields = self.options, decoded(row)
        if isinstance(fields, str):
            return fields
        if options.scores_column in fields:
            return f"there is a field {options.scores_column} already"
        for name in options.columns:
            if not isinstance(fields.get(name), str):
                return f"{name} is not text" if name in fields else f"there is no field {name}"
        query = "" if options.query_column is None else fields[options.query_column]
        return query, fields[options.item_column]

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield the request of the rows."""
        options, record = self.options, RequestRecord("", route="/v1/score")
        queries, items = [row.query for row in rows], [row.item for row in rows]
        body: dict[str, Any] = {"on_error": "null"}
        if self._family is None:
            labels = None if options.labels is None else options.labels.split(",")
            body |= {"labels": labels, "apply_softmax": options.apply_softmax}
            if len(set(queries)) > 1:
                body["items"] = [row.query + row.item for row in rows]
            else:
                body |= {"query": "".join(queries[:1]), "items": items}
        elif self._family.ranks:
            body |= {"queries": queries, "documents": items}
        else:
            body, record.route = {"input": items}, "/v1/classify"
        yield self.unit(rows, record, msgspec.json.encode(body))

    def results(self, unit: Unit, result: ScoreResult | None) -> Sequence[Result]:
        """Return the rows' results; raise GpuscoreError for all together."""
        answer = msgspec.json.decode(unit.answer(result))
        results: list[Result] = answer.get("scores")
        if self._family is not None:
            results = [row.get("probs") or [row["score"]] for row in answer["data"]]
        for error in answer.get("errors") or ():
            results[error["index"]] = self.failed(unit, FailedItem(**error))
        return results

    def failed(self, _: Unit, error: GpuscoreError | FailedItem) -> Result:
        """Return the result of a row that has failed."""
        return f"{error.code}: {_PLACE.sub('the row', error.message)}"  # not its number there


class RequestLine(msgspec.Struct):
    """A line of the input; further fields are ignored, as vLLM does."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


_line = msgspec.json.Decoder(RequestLine)


class RequestTask(Steps):
    """The answers to lines of requests."""

    def texts(self, row: Row) -> tuple[str, str] | str:
        """Return the body and the whole line of a request, or what is wrong with it."""
        try:
            text = row if isinstance(row, str) else row.decode()
            return bytes(_line.decode(text).body).decode(), text
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return f"the line is not a request: {error}"

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield the request of each line."""
        for row in rows:
            line = _line.decode(row.item)
            name = f"{row.part}:{row.place}:{line.custom_id}"  # the same whenever the job is run
            number = hashlib.sha256(name.encode()).hexdigest()[:ID_DIGITS]
            record = RequestRecord(number, route=line.url)
            yield self.unit([row], record, bytes(line.body))

    def results(self, unit: Unit, result: ScoreResult | None) -> Sequence[Result]:
        """Return the answer; raise GpuscoreError if it is an error."""
        return [_answer(unit, OK, unit.answer(result))]

    def failed(self, unit: Unit, error: GpuscoreError) -> Result:
        """Return the answer to a line that has failed."""
        if isinstance(unit.made, PreparedBody):
            places = scored_places(unit.made.errors, unit.made.body.num_items)
            error = renumbered(error, places)
        return _answer(unit, error.status, error_json(error, unit.record))


def _answer(unit: Unit, status: int, body: bytes) -> bytes:
    number, (row,) = unit.record.request_id, unit.rows
    # Its error is null, because the body has the server's error.
    response = {"status_code": status, "request_id": number, "body": msgspec.Raw(body)}
    names = {"id": f"batch_req_{number}", "custom_id": _line.decode(row.item).custom_id}
    return msgspec.json.encode({**names, "response": response, "error": None})


Task: TypeAlias = TableTask | RequestTask


def grouped(rows: Sequence[TextRow], task: Task) -> Iterator[Sequence[TextRow]]:
    """Yield the rows that go into one request each: rows that share a query, or, to save requests,
    rows that each have a query of their own, and of these, rows that begin alike: what all rows of
    a request begin with is computed once."""
    builder, limits = task.model.prompts.builder, task.model.engine.limits
    most_rows, most_text = min(GROUP_ROWS, builder.limits.max_items), GROUP_TEXT * limits.max_tokens
    # With a fixed cut, a row's bits depend on the query that its request shares, which must not
    # depend on the rows that are left.
    mixes = not builder.backend.deterministic_chunk
    uses = Counter(row.query for row in rows)

    starts = {row: (row.query + row.item)[:ALIKE] for row in rows}
    alike = Counter(start for start in starts.values() if len(start) == ALIKE)

    def shared(row: TextRow) -> tuple[str, str]:
        query = "" if mixes and uses[row.query] == 1 else row.query
        return query, starts[row] if not query and alike[starts[row]] > 1 else ""

    for (query, _), run in groupby(sorted(rows, key=lambda row: (shared(row), row)), shared):
        group: list[TextRow] = []
        size = 0
        for row in run:
            length = len(row.query) + len(row.item) - len(query)
            if group and (len(group) == most_rows or size + length > most_text):
                yield group
                group, size = [], 0
            group.append(row)
            size += length
        yield group


class Scoring:
    """The scoring of all rows that have no result yet.

    Requests that the engine loses are sent again: scoring has no effect but its result; the last
    time alone, so that no request is blamed for another. A request that fails, or is lost
    MOST_LOSSES times, is divided into its rows; a single row to which that happens is bad. Each row
    is settled exactly once.

    Args:
        task: makes units of rows, for its model.
        work: keeps the results.
        scored: called with numbers of rows that have results.
    """

    def __init__(self, task: Task, work: WorkFolder, scored: Callable[[int], None]) -> None:
        model = task.model
        self._engine, self._task = model.engine, task
        self._work, self._scored = work, scored
        self._most_tokens = BATCHES * model.replicas * model.engine.limits.max_tokens
        self._flying: dict[Future[ScoreResult], tuple[Unit, int]] = {}
        self._tokens = 0  # in flight
        self._again: deque[Unit] = deque()
        self._done: SimpleQueue[Future[ScoreResult] | Exception] = SimpleQueue()
        self._parts: dict[int, list[Result]] = {}  # that are being scored
        self._kept = time.monotonic()
        threading.Thread(target=self._watch, args=(model.wait_ended,), daemon=True).start()

    def _watch(self, wait_ended: Callable[[], None]) -> None:
        """Pass on that the engine has failed for good; runs in a thread."""
        try:
            wait_ended()
        except Exception as error:  # noqa: BLE001  (`run` raises it)
            self._done.put(error)

    def run(self, source: Input) -> None:
        """Score all rows; whatever ends it, results that are there are kept.

        Raises:
            EngineFailed: the engine cannot be kept running.
        """
        made = chain.from_iterable(map(self._task.units, self._groups(source)))
        try:
            while True:
                while self._tokens >= self._most_tokens:
                    self._collect()
                if unit := self._again.popleft() if self._again else next(made, None):
                    alone = unit.losses == MOST_LOSSES - 1
                    while alone and self._flying:
                        self._collect()
                    self._send(unit)
                    while alone and self._flying:
                        self._collect()
                elif self._flying:
                    self._collect()
                else:
                    return
        finally:
            self._keep()

    def _groups(self, source: Input) -> Iterator[Sequence[TextRow]]:
        """Yield the rows that go into one request each; settle those that are bad."""
        for number, block in enumerate(source.blocks()):
            results = self._work.results(number, len(block.rows))
            left = [place for place, result in enumerate(results) if result is None]
            if not left:
                continue
            self._parts[number], rows = results, []
            for place in left:
                if isinstance(text := self._task.texts(block.rows[place]), str):
                    self._settle([TextRow("", "", number, place)], [text])
                else:
                    rows.append(TextRow(*text, number, place))
            yield from grouped(rows, self._task)

    def _send(self, unit: Unit) -> None:
        """Send a unit; if no engine runs for now, wait shortly."""
        if unit.request is None:
            self._take(unit, None)
        elif self._engine.alive:
            (future,) = self._engine.score_all([unit.request])
            self._flying[future] = unit, unit.request.num_tokens
            self._tokens += unit.request.num_tokens
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
        unit, tokens = self._flying.pop(answer)
        self._tokens -= tokens
        self._take(unit, answer)

    def _take(self, unit: Unit, answer: "Future[ScoreResult] | None") -> None:
        try:
            results = self._task.results(unit, None if answer is None else answer.result())
        except GpuscoreError as failure:
            error, lost = failure, isinstance(failure, Unavailable)  # with its engine
            if lost and unit.losses + 1 < MOST_LOSSES:
                self._again.append(replace(unit, losses=unit.losses + 1))
                return
            if len(unit.rows) > 1:
                for row in unit.rows:
                    self._again += self._task.units([row])
                return
            if lost:
                what = f"the engine was lost {MOST_LOSSES} times while it had this row"
                error = InternalError(what)
            results = [self._task.failed(unit, error)]
        self._settle(unit.rows, results)

    def _settle(self, rows: Sequence[TextRow], results: Sequence[Result]) -> None:
        number = rows[0].part
        for row, result in zip(rows, results, strict=True):
            self._parts[number][row.place] = result
        self._scored(len(rows))
        if None not in self._parts[number]:
            self._work.save(f"{number}.part", self._parts.pop(number))
        if time.monotonic() - self._kept >= KEPT_EVERY:
            self._keep()

    def _keep(self) -> None:
        for number, results in self._parts.items():
            self._work.save(f"{number}.part", results)
        self._kept = time.monotonic()
