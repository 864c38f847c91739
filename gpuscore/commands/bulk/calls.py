"""Files of requests: OpenAI's batch format, as vLLM's run-batch takes it.

Each line is {"custom_id", "method", "url", "body"}. The dialect of the url answers the body, so the
answer is the one that the server would give.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpuscore.commands.bulk.rows import AnswerLine, Problem, TextRow
from gpuscore.commands.bulk.tasks import Unit
from gpuscore.dialects.dialect import (
    Dialect,
    PreparedBody,
    Scored,
    answered_name,
    cache_salt,
    choose,
)
from gpuscore.dialects.served import LoadedModel, ModelTable, ServedModel
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.dialects.wire import encode_error
from gpuscore.errors import GpuscoreError, MethodNotAllowed, NotFound
from gpuscore.text.boundaries import ALONE
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreResult
from gpuscore.types.results import renumbered, scored_places

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
    """Return the query and the whole line of a request, by which lines are sorted."""
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
        """Yield each line's request to the engine, or its answer if that has none."""
        for row in rows:
            line = _decoder.decode(row.rest)
            record = RequestRecord(_id(row, line))
            dialect = DIALECT_OF.get(line.url)
            try:
                call = self._call(line, dialect, record)
            except GpuscoreError as error:
                yield _failed(row, line, dialect, record, error)
                continue
            if call.prepared.request is None:
                yield _answered(row, call, None)
            else:
                salt = cache_salt("", call.prepared.salt)
                yield Unit([row], replace(call.prepared.request, salt=salt), call)

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
        body = dialect.decode(bytes(line.body), record)
        name = answered_name(choose(self._models, dialect, body), body)
        prepared = dialect.prepare(self._model, body, ALONE)
        return _Call(line, dialect, body, prepared, name, record)


def _id(row: TextRow, line: RequestLine) -> str:
    """Return an id that is the same whenever the job is run."""
    return hashlib.sha256(f"{row.number}:{line.custom_id}".encode()).hexdigest()[:ID_DIGITS]


def _answered(row: TextRow, call: _Call, result: ScoreResult | None) -> AnswerLine:
    record = call.record
    scored = Scored(call.body, call.prepared, result, call.model, record.request_id, call.line.url)
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
