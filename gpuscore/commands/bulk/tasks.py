"""From rows to requests of the engine, and from its results to scores or answers, as the dialects
of the server do it.

Rows of a table become bodies of /v1/score or /v1/classify. Lines of a file of requests have
OpenAI's batch format, as vLLM's run-batch takes it: {"custom_id", "method", "url", "body"}.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from gpuscore.commands.bulk.inputs import Block, Row
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.work import Answer, Result
from gpuscore.dialects.dialect import PreparedBody, answered_name, choose
from gpuscore.dialects.served import LoadedModel, ModelTable, ServedModel
from gpuscore.dialects.table import DIALECT_OF, error_json
from gpuscore.errors import ConfigError, GpuscoreError, MethodNotAllowed, NotFound
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import renumbered, scored_places

_PLACE = re.compile(r"\b(documents|input|items|queries)\[\d+\]")  # of a row in its request
OK, ID_DIGITS = 200, 24
# A row's query and item; of a file of requests, the body and the whole line; or why it is bad.
Texts: TypeAlias = tuple[str, str] | str


class TextRow(NamedTuple):
    """A row's texts, and its part and place in the part."""

    query: str
    item: str
    part: int
    place: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Some rows on their way.

    Attributes:
        request: for the engine; None if it need not be asked.
        read: returns the rows' results; raises GpuscoreError.
        failed: yields units in place of this one, which has failed.
        losses: engines that had it in flight.
    """

    rows: Sequence[TextRow]
    request: ScoreRequest | None
    read: Callable[[ScoreResult | None], Sequence[Result]]
    failed: "Callable[[GpuscoreError], Iterator[Unit]]"
    losses: int = 0

    @property
    def tokens(self) -> int:
        return 0 if self.request is None else self.request.num_tokens


def _settled(row: TextRow, result: Result) -> Unit:
    """Return the unit of a row that has its result already."""
    return Unit([row], None, lambda _: [result], lambda _: iter(()))


class Steps:
    """The server's steps before and after the engine, with one model."""

    def __init__(self, options: BatchOptions, model: LoadedModel, names: tuple[str, ...]) -> None:
        self.options, self.model, served = options, model, ServedModel(names[0], names[1:])
        served.loaded = model
        self._models = ModelTable([served])

    def prepared(self, method: str, body: bytes, record: RequestRecord) -> PreparedBody[Any]:
        dialect = DIALECT_OF.get(record.route)
        if dialect is None:
            raise NotFound("no such path")
        if method != "POST":
            raise MethodNotAllowed("this path does not have that method")
        decoded = dialect.decode(body, record, None)
        name = answered_name(choose(self._models, dialect, decoded), decoded)
        prepared = dialect.prepare(self.model, decoded)
        prepared.model, prepared.record = name, record
        return prepared

    def answer(self, prepared: PreparedBody[Any], result: ScoreResult | None) -> bytes:
        prepared.result = result
        return b"".join(DIALECT_OF[prepared.record.route].encode(prepared))


class TableTask(Steps):
    """The scores of a table's rows.

    Raises:
        ConfigError: there are no labels and no prompt family, or the family does not fit the
            options.
        GpuscoreError: the labels are not valid for the model.
    """

    def __init__(self, options: BatchOptions, model: LoadedModel, names: tuple[str, ...]) -> None:
        super().__init__(options, model, names)
        prompts = None if options.labels else model.prompts.family
        self._family = family = None if prompts is None else prompts.family
        if family is None:
            if options.labels is None and model.default_labels is None:
                raise ConfigError("--labels is missing: the model is of no known prompt family")
            self._prepared([])  # checks the labels
        elif family.ranks and options.query_column is None:
            raise ConfigError(f"--query-column is missing: prompts of {family.name} need a query")
        elif options.query_column and not family.ranks:
            raise ConfigError(f"--query-column: {family.name} judges single texts here")

    def texts(self, block: Block) -> list[Texts]:
        """Return the texts of every row, or what is wrong with it."""
        return list(map(self._texts, block.objects()))

    def _texts(self, row: dict[str, Any] | str) -> Texts:
        options = self.options
        if isinstance(row, str):
            return row
        if options.scores_column in row:
            return f"there is a field {options.taken}"
        for name in options.columns:
            if not isinstance(row.get(name), str):
                return f"{name} is not text" if name in row else f"there is no field {name}"
        query = "" if options.query_column is None else row[options.query_column]
        return query, row[options.item_column]

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield the request of the rows, or smaller ones if it cannot be made."""

        def divided(error: GpuscoreError) -> Iterator[Unit]:
            if len(rows) == 1:
                yield _settled(rows[0], _reason(error.code, error.message))
                return
            for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                yield from self.units(half)

        try:
            scored = self._prepared(rows)
        except GpuscoreError as error:  # of a single row, or of all together
            yield from divided(error)
        else:
            yield Unit(rows, scored.request, partial(self._results, scored), divided)

    def _prepared(self, rows: Sequence[TextRow]) -> PreparedBody[Any]:
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
        return self.prepared("POST", msgspec.json.encode(body), record)

    def _results(self, scored: PreparedBody[Any], result: ScoreResult | None) -> Sequence[Result]:
        answer = msgspec.json.decode(self.answer(scored, result))
        results: list[Result] = answer.get("scores")
        if self._family is not None:
            results = [row.get("probs") or [row["score"]] for row in answer["data"]]
        for error in answer.get("errors") or ():
            results[error["index"]] = _reason(error["code"], error["message"])
        return results


def _reason(code: str, message: str) -> str:
    return f"{code}: {_PLACE.sub('the row', message)}"  # not its number in a request


class RequestLine(msgspec.Struct):
    """A line of the input; further fields are ignored, as vLLM does."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class RequestTask(Steps):
    """The answers to lines of requests."""

    def texts(self, block: Block) -> list[Texts]:
        """Return the body and the whole line of every request, or what is wrong with it."""
        return list(map(_line_texts, block.rows))

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield each line's request to the engine, or its answer if it needs no request."""
        return map(self._unit, rows)

    def _unit(self, row: TextRow) -> Unit:
        line = msgspec.json.decode(row.item, type=RequestLine)
        name = f"{row.part}:{row.place}:{line.custom_id}"  # the same whenever the job is run
        number = hashlib.sha256(name.encode()).hexdigest()[:ID_DIGITS]
        record = RequestRecord(number, route=line.url)

        def answer(status: int, body: bytes) -> Answer:
            # Its error is null, because the body has the server's error.
            response = {"status_code": status, "request_id": number, "body": msgspec.Raw(body)}
            names = {"id": f"batch_req_{number}", "custom_id": line.custom_id}
            whole = msgspec.json.encode({**names, "response": response, "error": None})
            return Answer(whole, status != OK)

        def refused(error: GpuscoreError) -> Unit:
            return _settled(row, answer(error.status, error_json(error, record)))

        try:
            scored = self.prepared(line.method, bytes(line.body), record)
        except GpuscoreError as error:
            return refused(error)
        places = scored_places(scored.errors, scored.body.num_items)
        return Unit(
            [row],
            scored.request,
            lambda result: [answer(OK, self.answer(scored, result))],
            lambda error: iter([refused(renumbered(error, places))]),
        )


def _line_texts(row: Row) -> Texts:
    try:
        text = row if isinstance(row, str) else row.decode()
        return bytes(msgspec.json.decode(text, type=RequestLine).body).decode(), text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"the line is not a request: {error}"


Task: TypeAlias = TableTask | RequestTask
