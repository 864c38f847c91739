"""From rows to requests of the engine, and from its results to scores or answers.

Lines of a file of requests have OpenAI's batch format, as vLLM's run-batch takes it: {"custom_id",
"method", "url", "body"}. The dialect of the url answers the body, so the answer is the same as the
server's.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.rows import (
    AnswerLine,
    BadTextRow,
    Problem,
    RowScoring,
    Settled,
    TextRow,
)
from gpuscore.dialects.dialect import (
    Dialect,
    PreparedBody,
    Scored,
    answered_name,
    choose,
)
from gpuscore.dialects.served import LoadedModel, ModelTable, ServedModel
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.dialects.wire import encode_error
from gpuscore.errors import ConfigError, GpuscoreError, MethodNotAllowed, NotFound
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import label_scores, per_token, softmax
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import renumbered, scored_places

_INDEX = re.compile(r"\[(\d+)\]$")  # of the item that an error is about


@dataclass(frozen=True, slots=True)
class Unit:
    """A request to the engine, and the rows that it answers."""

    rows: Sequence[TextRow]
    request: ScoreRequest
    notes: Any = None  # of the task that made it
    losses: int = 0  # of engines that had it in flight


class TableTask:
    """The scores of a table's rows.

    Args:
        width: number of scores of a row.
        build: makes the request of a group of rows; raises GpuscoreError.
        scores: returns [rows, width] of a request's result.
    """

    def __init__(
        self,
        width: int,
        build: Callable[[Sequence[TextRow]], ScoreRequest],
        scores: Callable[[ScoreRequest, ScoreResult], Float64Array],
    ) -> None:
        self.width = width
        self._build, self._scores = build, scores

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit | Settled]:
        """Yield the request of the rows. If some rows make it invalid, they are settled as bad, and
        the other rows get requests without them."""
        waiting = [rows]
        while waiting:
            part = waiting.pop()
            try:
                request = self._build(part)
            except GpuscoreError as error:
                if len(part) == 1:
                    yield _bad(part[0], error)
                else:
                    waiting += reversed(_divided(part, error))
                continue
            yield Unit(part, request)

    def settle(self, unit: Unit, result: ScoreResult) -> Settled:
        return RowScoring([row.number for row in unit.rows], self._scores(unit.request, result))

    def failed(self, unit: Unit, error: GpuscoreError) -> Iterator[Unit | Settled]:
        """Yield smaller requests in place of a failed request, or the outcome of a single row."""
        if len(unit.rows) == 1:
            yield _bad(unit.rows[0], error)
            return
        for part in _divided(unit.rows, error):
            yield from self.units(part)


def _bad(row: TextRow, error: GpuscoreError) -> BadTextRow:
    message = error.message
    if error.param is not None and _INDEX.search(error.param):
        message = message.replace(error.param, "the row")  # not the item's number in a request
    return BadTextRow(row.number, f"{error.code}: {message}")


def _divided(rows: Sequence[TextRow], error: GpuscoreError) -> list[Sequence[TextRow]]:
    """Divide the rows at the row that the error names, or else in the middle."""
    match = _INDEX.search(error.param or "")
    index = int(match[1]) if match else len(rows)
    if index >= len(rows):
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]
    return [part for part in (rows[:index], rows[index : index + 1], rows[index + 1 :]) if part]


def make_table_task(options: BatchOptions, model: LoadedModel) -> TableTask:
    """Return the task of a table with the model.

    Raises:
        ConfigError: there are no labels and no prompt family, or the family does not fit the
            columns.
        GpuscoreError: the labels are not valid for the model.
    """
    if not options.has_labels and model.prompts.family is not None:
        return _family_task(options, model.prompts.family)
    if options.instruction is not None:
        raise ConfigError("--instruction is for prompt families, and the model has none")
    classes = model.engine.limits.classes
    if not options.has_labels and classes is None:
        raise ConfigError("--labels is missing: the model belongs to no known prompt family")
    return _labels_task(options, model.prompts.builder, classes or ())


def _labels_task(
    options: BatchOptions, builder: PromptBuilder, classes: Sequence[str]
) -> TableTask:
    apply, mean = options.apply_softmax, options.label_length_normalization == "mean"

    def score_input(first: str, items: Sequence[str]) -> ScoreInput:
        return ScoreInput(
            first,
            items,
            labels=options.labels,
            label_sequences=options.label_sequences,
            label_token_ids=None if options.has_labels else range(len(classes)),
            need_lse=not apply,
        )

    def build(rows: Sequence[TextRow]) -> ScoreRequest:
        first, items = rows[0].first, [row.rest for row in rows]
        if any(row.first != first for row in rows):
            first, items = b"", [row.first + row.rest for row in rows]
        request = builder.build(score_input(first.decode(), [item.decode() for item in items]))
        assert request is not None  # noqa: S101  (there is a row)
        return request

    def scores(request: ScoreRequest, result: ScoreResult) -> Float64Array:
        shown = per_token(result, request.trie) if mean else result
        rows = label_scores(shown, apply_softmax=apply, temperature=options.temperature)
        return np.stack(rows)

    builder.build(score_input("", []))  # checks the labels only
    width = len(options.labels or options.label_sequences or classes)
    return TableTask(width, build, scores)


def _family_task(options: BatchOptions, prompts: FamilyPrompts) -> TableTask:
    family, asks = prompts.family, options.query_column is not None
    if family.ranks and not asks:
        raise ConfigError(f"--query-column is missing: prompts of {family.name} need a query")
    if asks and family.classes and not family.answering_parts:
        raise ConfigError(f"--query-column: prompts of {family.name} have no query")
    if options.instruction is not None and not family.takes_instruction:
        raise ConfigError(f"--instruction: prompts of {family.name} have no instruction")

    def build(rows: Sequence[TextRow]) -> ScoreRequest:
        query = [row.first.decode() for row in rows] if asks else None
        documents = [row.rest.decode() for row in rows]
        return prompts.build(RerankInput(query, documents, options.instruction)).request

    def relevance(_: ScoreRequest, result: ScoreResult) -> Float64Array:
        return family.relevance(prompts.raw_scores(result))[:, None]

    def classes(_: ScoreRequest, result: ScoreResult) -> Float64Array:
        return softmax(np.stack(result.label_logits).astype(np.float64))

    if family.ranks:
        return TableTask(1, build, relevance)
    return TableTask(len(family.classes), build, classes)


OK = 200
ID_DIGITS = 24


class RequestLine(msgspec.Struct):
    """A line of the input; further fields are ignored, as vLLM does."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class ResponsePart(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct):
    """A line of the output; `error` is always null, because the body has the server's error."""

    id: str
    custom_id: str
    response: ResponsePart
    error: None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """A line on its way to the engine."""

    line: RequestLine
    dialect: Dialect[Any]
    body: Any
    prepared: PreparedBody
    model: str
    record: RequestRecord


def call_text(row: dict[str, Any] | Problem, line: bytes) -> tuple[str, ...] | Problem:
    """Return the sort key of a request: its query and its whole line."""
    if isinstance(row, Problem):
        return row
    for name in ("custom_id", "method", "url"):
        if not isinstance(row.get(name), str):
            return Problem(f"{name} must be text")
    if not isinstance(row.get("body"), dict):
        return Problem("body must be an object")
    query = row["body"].get("query")
    return query if isinstance(query, str) else "", line.decode()


_decoder = msgspec.json.Decoder(RequestLine)


class RequestTask:
    """The answers to lines of requests, in the dialects of the server.

    Args:
        names: the names by which bodies may call the model.
    """

    width = 1

    def __init__(self, model: LoadedModel, names: tuple[str, ...]) -> None:
        self._model = model
        served = ServedModel(names[0], names[1:])
        served.loaded = model
        self._models = ModelTable([served])

    def units(self, rows: Sequence[TextRow]) -> "Iterator[Unit | AnswerLine]":
        """Yield each line's request to the engine, or its answer if it needs no request."""
        for row in rows:
            line = _decoder.decode(row.rest)
            record = RequestRecord(_id(row, line), route=line.url)
            dialect = DIALECT_OF.get(line.url)
            try:
                call = self._call(line, dialect, record)
            except GpuscoreError as error:
                yield _failed(row, line, dialect, record, error)
                continue
            if call.prepared.request is None:
                yield _answered(row, call, None)
            else:
                yield Unit([row], call.prepared.request, call)

    def settle(self, unit: Unit, result: ScoreResult) -> AnswerLine:
        return _answered(unit.rows[0], unit.notes, result)

    def failed(self, unit: Unit, error: GpuscoreError) -> "Iterator[Unit | AnswerLine]":
        call: _Call = unit.notes
        error = renumbered(error, scored_places(call.prepared.errors, call.body.num_items))
        yield _failed(unit.rows[0], call.line, call.dialect, call.record, error)

    def _call(
        self, line: RequestLine, dialect: Dialect[Any] | None, record: RequestRecord
    ) -> _Call:
        """Take the server's steps up to the engine; raise GpuscoreError as they do."""
        if dialect is None:
            raise NotFound("no such path")
        if line.method != "POST":
            raise MethodNotAllowed("this path does not have that method")
        body = dialect.decode(bytes(line.body), record, None)
        name = answered_name(choose(self._models, dialect, body), body)
        prepared = dialect.prepare(self._model, body)
        return _Call(line, dialect, body, prepared, name, record)


def _id(row: TextRow, line: RequestLine) -> str:
    """Return an id that is the same whenever the job is run."""
    return hashlib.sha256(f"{row.number}:{line.custom_id}".encode()).hexdigest()[:ID_DIGITS]


def _answered(row: TextRow, call: _Call, result: ScoreResult | None) -> AnswerLine:
    record = call.record
    scored = Scored(call.body, call.prepared, result, call.model, record)
    try:
        body = b"".join(call.dialect.encode(scored))
    except GpuscoreError as error:
        return _failed(row, call.line, call.dialect, record, error)
    return _line(row, call.line, OK, record, body)


def _failed(
    row: TextRow,
    line: RequestLine,
    dialect: Dialect[Any] | None,
    record: RequestRecord,
    error: GpuscoreError,
) -> AnswerLine:
    encode = encode_error if dialect is None else dialect.encode_error
    return _line(row, line, error.status, record, encode(error, record.variant))


def _line(
    row: TextRow, line: RequestLine, status: int, record: RequestRecord, body: bytes
) -> AnswerLine:
    response = ResponsePart(status, record.request_id, msgspec.Raw(body))
    made = OutputLine(f"batch_req_{record.request_id}", line.custom_id, response)
    return AnswerLine(row.number, msgspec.json.encode(made), status != OK)


Task: TypeAlias = TableTask | RequestTask


def make_task(options: BatchOptions, model: LoadedModel, names: tuple[str, ...]) -> Task:
    """Return the task of a job; `names` are the model's. Raises as `make_table_task`."""
    return RequestTask(model, names) if options.requests else make_table_task(options, model)
