"""Scores the rows of a batch job with the code of the server's routes.

Rows become requests, a bounded number of requests is in flight, and results are saved. Rows of a
table become bodies of /v1/score or /v1/classify. A file of requests has OpenAI's batch format, like
vLLM's run-batch: each line has custom_id, method, url and body.
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
from typing import Any, Literal, NamedTuple

import msgspec

from gpuscore.commands.bulk.inputs import Input, Row, decoded
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.work import JobFolder, Result
from gpuscore.dialects.dialect import PreparedBody, answered_name, choose
from gpuscore.dialects.served import LoadedModel, ModelTable, ServedModel
from gpuscore.dialects.table import DIALECT_OF, error_json
from gpuscore.dialects.wire import FailedItem
from gpuscore.errors import ConfigError, GpuscoreError, InternalError, NotFound, Unavailable
from gpuscore.types.item_errors import renumbered
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreResult

# Names a row by its index in the request.
_PLACE = re.compile(r"\b(documents|input|items|queries)\[\d+\]")
GROUP_ROWS = 2048  # most rows of one request
# Most characters of one request per token of a batch. A request then takes about two batches, so
# results come every few seconds even on a slow machine.
GROUP_TEXT = 8
ALIKE = 256  # characters; rows that begin alike share a request, so these are computed once
BATCHES = 8  # full batches of tokens that are in flight for each replica
MAX_LOSSES = 3  # a request that was in flight when so many engines ended counts as the cause
PAUSE = 0.2  # seconds to wait while no engine runs
SAVE_EVERY = 10.0  # seconds of scoring between saves


class TextRow(NamedTuple):
    """A row's query and item; for a line of requests, its body and the whole line."""

    query: str
    item: str
    part: int  # the number of its block
    place: int  # its index in the block


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that are scored with one request.

    Attributes:
        prepared: the request, or why it cannot be built.
        losses: how many engines ended while it was in flight.
    """

    rows: Sequence[TextRow]
    record: RequestRecord
    prepared: PreparedBody[Any] | GpuscoreError
    losses: int = 0

    def answer(self, result: ScoreResult | None) -> bytes:
        """Return the server's answer; raise GpuscoreError if there is no request."""
        if isinstance(self.prepared, GpuscoreError):
            raise self.prepared
        self.prepared.result = result
        return b"".join(DIALECT_OF[self.record.route].encode(self.prepared))


class UnitBuilder:
    """Builds requests as the server does, for one model."""

    def __init__(self, options: BatchOptions, served: ServedModel) -> None:
        self.options = options
        self.model = served.ready()
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
        prepared.model = name
        prepared.record = record
        return Unit(rows, record, prepared)


class TableTask(UnitBuilder):
    """Scores the rows of a table.

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
        """Return the texts of a row, or a text that says why it is bad."""
        fields = decoded(row)
        if isinstance(fields, str):
            return fields
        if self.options.scores_column in fields:
            return f"there is a field {self.options.scores_column} already"
        for name in self.options.columns:
            if not isinstance(fields.get(name), str):
                return f"{name} is not text" if name in fields else f"there is no field {name}"
        query_column = self.options.query_column
        query = "" if query_column is None else fields[query_column]
        return query, fields[self.options.item_column]

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield the request of the rows."""
        options = self.options
        record = RequestRecord("", route="/v1/score")
        queries = [row.query for row in rows]
        items = [row.item for row in rows]
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
            body = {"input": items}
            record.route = "/v1/classify"
        yield self.unit(rows, record, msgspec.json.encode(body))

    def results(self, unit: Unit, result: ScoreResult | None) -> Sequence[Result]:
        """Return the rows' results; raise GpuscoreError if the whole request failed."""
        answer = msgspec.json.decode(unit.answer(result))
        results: list[Result] = answer.get("scores")
        if self._family is not None:
            results = [row.get("probs") or [row["score"]] for row in answer["data"]]
        for error in answer.get("errors") or ():
            results[error["index"]] = self.failed(unit, FailedItem(**error))
        return results

    def failed(self, _: Unit, error: GpuscoreError | FailedItem) -> Result:
        """Return the result of a row that has failed."""
        return f"{error.code}: {_PLACE.sub('the row', error.message)}"


class RequestLine(msgspec.Struct):
    """A line of the input; other fields are ignored, as in vLLM."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class RequestTask(UnitBuilder):
    """Answers lines of requests."""

    def texts(self, row: Row) -> tuple[str, str] | str:
        """Return the body and the whole line of a request, or a text that says why it is bad."""
        try:
            text = row if isinstance(row, str) else row.decode()
            return bytes(msgspec.json.decode(text, type=RequestLine).body).decode(), text
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return f"the line is not a request: {error}"

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield the request of each line."""
        for row in rows:
            line = msgspec.json.decode(row.item, type=RequestLine)
            name = f"{row.part}:{row.place}:{line.custom_id}"  # the same in every run of the job
            number = hashlib.sha256(name.encode()).hexdigest()[:24]
            yield self.unit([row], RequestRecord(number, route=line.url), bytes(line.body))

    def results(self, unit: Unit, result: ScoreResult | None) -> Sequence[Result]:
        """Return the answer; raise GpuscoreError if it is an error."""
        return [_answer(unit, 200, unit.answer(result))]

    def failed(self, unit: Unit, error: GpuscoreError) -> Result:
        """Return the answer to a line that has failed."""
        if isinstance(unit.prepared, PreparedBody):
            error = renumbered(error, unit.prepared.scored_places)
        return _answer(unit, error.status, error_json(error, unit.record))


def _answer(unit: Unit, status: int, body: bytes) -> bytes:
    number = unit.record.request_id
    # "error" is null, because the body holds the server's error.
    response = {"status_code": status, "request_id": number, "body": msgspec.Raw(body)}
    line = msgspec.json.decode(unit.rows[0].item, type=RequestLine)
    names = {"id": f"batch_req_{number}", "custom_id": line.custom_id}
    return msgspec.json.encode({**names, "response": response, "error": None})


def grouped(rows: Sequence[TextRow], model: LoadedModel) -> Iterator[Sequence[TextRow]]:
    """Divide rows into groups of one request each.

    Rows with the same query form a group. Rows with a unique query are grouped, too, to save
    requests; those whose texts begin alike go together, because the beginning is computed once.
    """
    builder = model.prompts.builder
    max_rows = min(GROUP_ROWS, builder.limits.max_items)
    max_text = GROUP_TEXT * model.engine.limits.max_tokens
    # With --deterministic a score's bits depend on the query that its request shares. That must not
    # depend on which rows are left to score, so rows of different queries are not mixed.
    mix_queries = not builder.backend.deterministic_chunk
    uses = Counter(row.query for row in rows)

    starts = {row: (row.query + row.item)[:ALIKE] for row in rows}
    alike = Counter(start for start in starts.values() if len(start) == ALIKE)

    def group_key(row: TextRow) -> tuple[str, str]:
        query = "" if mix_queries and uses[row.query] == 1 else row.query
        return query, starts[row] if not query and alike[starts[row]] > 1 else ""

    for (query, _), run in groupby(sorted(rows, key=lambda row: (group_key(row), row)), group_key):
        group: list[TextRow] = []
        size = 0
        for row in run:
            length = len(row.query) + len(row.item) - len(query)
            if group and (len(group) == max_rows or size + length > max_text):
                yield group
                group = []
                size = 0
            group.append(row)
            size += length
        yield group


class Scoring:
    """Scores all rows that have no result yet.

    If the engine ends, its requests are sent again. The last attempt of a request is made while no
    other is in flight, so that no other can be the cause. A request that fails, or was in flight
    when MAX_LOSSES engines ended, is divided into its rows; if it has one row, that row is bad.

    Args:
        task: builds requests.
        folder: saves the results.
        scored: called with the number of rows that got results.
    """

    def __init__(
        self, task: TableTask | RequestTask, folder: JobFolder, scored: Callable[[int], None]
    ) -> None:
        model = task.model
        self._task = task
        self._folder = folder
        self._scored = scored
        self._max_tokens = BATCHES * model.replicas * model.engine.limits.max_tokens
        self._in_flight: dict[Future[ScoreResult], tuple[Unit, int]] = {}
        self._tokens = 0  # tokens in flight
        self._retries: deque[Unit] = deque()
        self._done: SimpleQueue[Future[ScoreResult] | Exception] = SimpleQueue()
        self._parts: dict[int, list[Result]] = {}  # results of parts that are not complete
        self._saved_at = time.monotonic()
        threading.Thread(target=self._watch, args=(model.wait_ended,), daemon=True).start()

    def _watch(self, wait_ended: Callable[[], None]) -> None:
        """Wait in a thread until the engine cannot be kept running, and pass the error to `run`."""
        try:
            wait_ended()
        except Exception as error:  # noqa: BLE001  (`_collect` raises it)
            self._done.put(error)

    def run(self, source: Input) -> None:
        """Score all rows. Results are saved even if this ends with an error.

        Raises:
            EngineFailed: the engine cannot be kept running.
        """
        units = chain.from_iterable(map(self._task.units, self._groups(source)))
        try:
            while True:
                while self._tokens >= self._max_tokens:
                    self._collect()
                if unit := self._retries.popleft() if self._retries else next(units, None):
                    alone = unit.losses == MAX_LOSSES - 1
                    while alone and self._in_flight:
                        self._collect()
                    self._send(unit)
                    while alone and self._in_flight:
                        self._collect()
                elif self._in_flight:
                    self._collect()
                else:
                    return
        finally:
            self._save_parts()

    def _groups(self, source: Input) -> Iterator[Sequence[TextRow]]:
        """Yield the rows of each request; bad rows get their result at once."""
        for number, block in enumerate(source.blocks()):
            results = self._folder.results(number, len(block.rows))
            left = [place for place, result in enumerate(results) if result is None]
            if not left:
                continue
            self._parts[number] = results
            rows = []
            for place in left:
                if isinstance(text := self._task.texts(block.rows[place]), str):
                    self._set_results([TextRow("", "", number, place)], [text])
                else:
                    rows.append(TextRow(*text, number, place))
            yield from grouped(rows, self._task.model)

    def _send(self, unit: Unit) -> None:
        """Send a unit to the engine, or wait shortly if no engine runs at the moment."""
        prepared = unit.prepared
        if isinstance(prepared, GpuscoreError) or prepared.request is None:
            self._take(unit, None)
        elif self._task.model.engine.alive:
            (future,) = self._task.model.engine.score_all([prepared.request])
            self._in_flight[future] = unit, prepared.request.num_tokens
            self._tokens += prepared.request.num_tokens
            future.add_done_callback(self._done.put)
        else:
            self._retries.append(unit)
            self._collect(PAUSE)

    def _collect(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` for an answer, and take its rows' results."""
        try:
            answer = self._done.get(timeout=seconds)
        except Empty:
            return
        if isinstance(answer, Exception):
            raise answer
        unit, tokens = self._in_flight.pop(answer)
        self._tokens -= tokens
        self._take(unit, answer)

    def _take(self, unit: Unit, answer: "Future[ScoreResult] | None") -> None:
        try:
            results = self._task.results(unit, None if answer is None else answer.result())
        except GpuscoreError as error:
            lost = isinstance(error, Unavailable)  # its engine ended
            if lost and unit.losses + 1 < MAX_LOSSES:
                self._retries.append(replace(unit, losses=unit.losses + 1))
                return
            if len(unit.rows) > 1:
                for row in unit.rows:
                    self._retries += self._task.units([row])
                return
            if lost:
                error = InternalError(f"the engine ended {MAX_LOSSES} times while it had this row")
            results = [self._task.failed(unit, error)]
        self._set_results(unit.rows, results)

    def _set_results(self, rows: Sequence[TextRow], results: Sequence[Result]) -> None:
        number = rows[0].part
        for row, result in zip(rows, results, strict=True):
            self._parts[number][row.place] = result
        self._scored(len(rows))
        if None not in self._parts[number]:
            self._folder.save(f"{number}.part", self._parts.pop(number))
        if time.monotonic() - self._saved_at >= SAVE_EVERY:
            self._save_parts()

    def _save_parts(self) -> None:
        for number, results in self._parts.items():
            self._folder.save(f"{number}.part", results)
        self._saved_at = time.monotonic()
