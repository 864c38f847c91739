"""The answers to lines of OpenAI's batch format, as vLLM's run-batch takes it: {"custom_id",
"method", "url", "body"}. The dialect of the url answers the body, so the answer is the server's.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpuscore.commands.bulk.inputs import Block, Decoded, Problem
from gpuscore.commands.bulk.tasks import Row, Settled, Unit
from gpuscore.commands.bulk.work import Answer
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


@dataclass(slots=True)
class _Call:
    """A line on its way to the engine and back."""

    line: RequestLine
    record: RequestRecord
    dialect: Dialect[Any] | None = None
    body: Any = None
    prepared: PreparedBody = PreparedBody(None)
    model: str = ""


class RequestTask:
    """The answers to lines of requests, in the dialects of the server.

    Args:
        names: the names by which bodies may call the model.
    """

    def __init__(self, model: LoadedModel, names: tuple[str, ...]) -> None:
        self._model = model
        served = ServedModel(names[0], names[1:])
        served.loaded = model
        self._models = ModelTable([served])
        self._decoder = msgspec.json.Decoder(RequestLine)

    def texts(self, block: Block) -> "list[tuple[str, ...] | Problem]":
        """Return the query and the whole line of every request."""
        return [_texts(*pair) for pair in zip(block.decoded(), block.rows, strict=True)]

    def units(self, rows: Sequence[Row]) -> Iterator[Unit | Settled]:
        """Yield each line's request to the engine, or its answer if it needs no request."""
        for row in rows:
            line = self._decoder.decode(row.rest)
            # The same id whenever the job is run.
            place = f"{row.part}:{row.index}:{line.custom_id}"
            number = hashlib.sha256(place.encode()).hexdigest()[:ID_DIGITS]
            call = _Call(line, RequestRecord(number), DIALECT_OF.get(line.url))
            try:
                self._prepare(call)
            except GpuscoreError as error:
                yield Settled([row], [_failed(call, error)])
                continue
            request = call.prepared.request
            if request is None:
                yield Settled([row], [_answered(call, None)])
            else:
                salt = cache_salt("", call.prepared.salt)
                yield Unit([row], replace(request, salt=salt), call)

    def settle(self, unit: Unit, result: ScoreResult) -> Settled:
        return Settled(unit.rows, [_answered(unit.notes, result)])

    def failed(self, unit: Unit, error: GpuscoreError) -> Iterator[Unit | Settled]:
        call: _Call = unit.notes
        error = renumbered(error, scored_places(call.prepared.errors, call.body.num_items))
        yield Settled(unit.rows, [_failed(call, error)])

    def _prepare(self, call: _Call) -> None:
        """Take the server's steps up to the engine; raise GpuscoreError as they do."""
        if call.dialect is None:
            raise NotFound("no such path")
        if call.line.method != "POST":
            raise MethodNotAllowed("this path does not have that method")
        call.body = call.dialect.decode(bytes(call.line.body), call.record, None)
        call.model = answered_name(choose(self._models, call.dialect, call.body), call.body)
        call.prepared = call.dialect.prepare(self._model, call.body, ALONE)


def _texts(row: Decoded, line: Any) -> tuple[str, ...] | Problem:
    if isinstance(row, Problem):
        return row
    for name in ("custom_id", "method", "url"):
        if not isinstance(row.get(name), str):
            return Problem(f"{name} must be text")
    if not isinstance(row.get("body"), dict):
        return Problem("body must be an object")
    query = row["body"].get("query")
    return query if isinstance(query, str) else "", line.decode()


def _answered(call: _Call, result: ScoreResult | None) -> Answer:
    assert call.dialect is not None  # noqa: S101  (the call was prepared)
    number, path = call.record.request_id, call.line.url
    scored = Scored(call.body, call.prepared, result, call.model, number, path)
    try:
        return _answer(call, OK, b"".join(call.dialect.encode(scored)))
    except GpuscoreError as error:
        return _failed(call, error)


def _failed(call: _Call, error: GpuscoreError) -> Answer:
    encode = encode_error if call.dialect is None else call.dialect.encode_error
    return _answer(call, error.status, encode(error, call.record.variant))


def _answer(call: _Call, status: int, body: bytes) -> Answer:
    """Return a line of the output; its error is null, because the body has the server's error."""
    number = call.record.request_id
    line = {
        "id": f"batch_req_{number}",
        "custom_id": call.line.custom_id,
        "response": {"status_code": status, "request_id": number, "body": msgspec.Raw(body)},
        "error": None,
    }
    return Answer(msgspec.json.encode(line), status != OK)
