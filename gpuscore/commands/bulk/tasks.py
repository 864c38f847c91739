"""From rows to requests of the engine, and from its results to scores or answers.

Lines of a file of requests have OpenAI's batch format, as vLLM's run-batch takes it: {"custom_id",
"method", "url", "body"}. The dialect of the url answers the body, so the answer is the server's.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from gpuscore.commands.bulk.options import BatchOptions, Decoded, Texts
from gpuscore.commands.bulk.work import Answer, Result
from gpuscore.dialects.dialect import Scored, answered_name, choose
from gpuscore.dialects.served import LoadedModel, ModelTable, ServedModel
from gpuscore.dialects.table import DIALECT_OF, error_json
from gpuscore.errors import ConfigError, GpuscoreError, MethodNotAllowed, NotFound
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import label_scores, per_token, renumbered, scored_places, softmax

_INDEX = re.compile(r"\[(\d+)\]$")  # of the item that an error is about
OK, ID_DIGITS = 200, 24


class TextRow(NamedTuple):
    """A row's texts. Rows sort by them, so rows that begin alike become neighbours."""

    first: str  # rows with the same first text become one request
    rest: str
    part: int
    place: int  # in its part


@dataclass(frozen=True, slots=True)
class Unit:
    """Some rows on their way: a request to the engine, or already their results.

    Attributes:
        notes: of the task that made it.
        losses: engines that had it in flight.
    """

    rows: Sequence[TextRow]
    request: ScoreRequest | None
    results: Sequence[Result] = ()
    notes: Any = None
    losses: int = 0

    @property
    def tokens(self) -> int:
        return 0 if self.request is None else self.request.num_tokens


Build = Callable[[Sequence[TextRow]], ScoreRequest]
Read = Callable[[ScoreRequest, ScoreResult], Float64Array]


class TableTask:
    """The scores of a table's rows.

    Raises:
        ConfigError: there are no labels and no prompt family, or the family does not fit the
            columns.
        GpuscoreError: the labels are not valid for the model.
    """

    def __init__(self, options: BatchOptions, model: LoadedModel) -> None:
        self._options, family = options, model.prompts.family
        self._build: Build  # makes the request of some rows; raises GpuscoreError
        self._read: Read  # returns [rows, labels]
        if options.has_labels or family is None:
            self._build, self._read = _of_labels(options, model)
        else:
            self._build, self._read = _of_family(options, family)

    def texts(self, block: Any) -> list[Texts]:
        """Return the texts of every row, or what is wrong with it."""
        texts: list[Texts] = block.texts(self._options)
        return texts

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield the request of the rows. If some rows make it invalid, they are bad, and the other
        rows get requests without them."""
        waiting = [rows]
        while waiting:
            part = waiting.pop()
            try:
                yield Unit(part, self._build(part))
            except GpuscoreError as error:
                if len(part) == 1:
                    yield _bad(part, error)
                else:
                    waiting += reversed(_divided(part, error))

    def results(self, unit: Unit, result: ScoreResult) -> Sequence[Result]:
        """Return the results of a unit's rows."""
        assert unit.request is not None  # noqa: S101  (it has a result)
        scores: list[Result] = self._read(unit.request, result).tolist()
        return scores

    def failed(self, unit: Unit, error: GpuscoreError) -> Iterator[Unit]:
        """Yield smaller units in place of one that failed, or the result of a single row."""
        if len(unit.rows) == 1:
            yield _bad(unit.rows, error)
            return
        for part in _divided(unit.rows, error):
            yield from self.units(part)


def _bad(rows: Sequence[TextRow], error: GpuscoreError) -> Unit:
    message = error.message
    if error.param is not None and _INDEX.search(error.param):
        message = message.replace(error.param, "the row")  # not the item's number in a request
    return Unit(rows, None, [f"{error.code}: {message}"])


def _divided(rows: Sequence[TextRow], error: GpuscoreError) -> list[Sequence[TextRow]]:
    """Divide the rows at the row that the error names, or else in the middle."""
    match = _INDEX.search(error.param or "")
    index = int(match[1]) if match else len(rows)
    cuts = [index, index + 1] if index < len(rows) else [len(rows) // 2]
    return [rows[start:end] for start, end in pairwise([0, *cuts, len(rows)]) if start < end]


def _of_labels(options: BatchOptions, model: LoadedModel) -> tuple[Build, Read]:
    """Return the functions of scores for labels of the job's own, or for all classes."""
    builder, classes = model.prompts.builder, model.engine.limits.classes
    if options.instruction is not None:
        raise ConfigError("--instruction is for prompt families, and the model has none")
    if not options.has_labels and classes is None:
        raise ConfigError("--labels is missing: the model belongs to no known prompt family")

    def score_input(first: str, items: Sequence[str]) -> ScoreInput:
        return ScoreInput(
            first,
            items,
            labels=options.labels,
            label_sequences=options.label_sequences,
            label_token_ids=None if options.has_labels else range(len(classes or ())),
            need_lse=not options.apply_softmax,
        )

    def build(rows: Sequence[TextRow]) -> ScoreRequest:
        first, items = rows[0].first, [row.rest for row in rows]
        if any(row.first != first for row in rows):
            first, items = "", [row.first + row.rest for row in rows]
        request = builder.build(score_input(first, items))
        assert request is not None  # noqa: S101  (there is a row)
        return request

    def scores(request: ScoreRequest, result: ScoreResult) -> Float64Array:
        mean = options.label_length_normalization == "mean"
        shown = per_token(result, request.trie) if mean else result
        softmax, temperature = options.apply_softmax, options.temperature
        return np.stack(label_scores(shown, apply_softmax=softmax, temperature=temperature))

    builder.build(score_input("", []))  # checks the labels only
    return build, scores


def _of_family(options: BatchOptions, prompts: FamilyPrompts) -> tuple[Build, Read]:
    """Return the functions of a family's relevance, or of its classes' probabilities."""
    family, asks = prompts.family, options.query_column is not None
    if family.ranks and not asks:
        raise ConfigError(f"--query-column is missing: prompts of {family.name} need a query")
    if asks and family.classes and not family.answering_parts:
        raise ConfigError(f"--query-column: prompts of {family.name} have no query")
    if options.instruction is not None and not family.takes_instruction:
        raise ConfigError(f"--instruction: prompts of {family.name} have no instruction")

    def build(rows: Sequence[TextRow]) -> ScoreRequest:
        queries = [row.first for row in rows] if asks else None
        documents = [row.rest for row in rows]
        request = prompts.build(RerankInput(queries, documents, options.instruction)).request
        assert request is not None  # noqa: S101  (an error of a document is raised)
        return request

    def relevance(_: ScoreRequest, result: ScoreResult) -> Float64Array:
        return family.relevance(prompts.raw_scores(result))[:, None]

    def classes(_: ScoreRequest, result: ScoreResult) -> Float64Array:
        return softmax(np.stack(result.label_logits).astype(np.float64))

    return build, relevance if family.ranks else classes


class RequestLine(msgspec.Struct):
    """A line of the input; further fields are ignored, as vLLM does."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class RequestTask:
    """The answers to lines of requests, in the dialects of the server.

    Args:
        names: the names by which bodies may call the model.
    """

    def __init__(self, model: LoadedModel, names: tuple[str, ...]) -> None:
        served = ServedModel(names[0], names[1:])
        served.loaded = self._model = model
        self._models = ModelTable([served])
        self._decoder = msgspec.json.Decoder(RequestLine)

    def texts(self, block: Any) -> list[Texts]:
        """Return the query and the whole line of every request, or what is wrong with it."""
        return [_line_texts(*pair) for pair in zip(block.decoded(), block.rows, strict=True)]

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit]:
        """Yield each line's request to the engine, or its answer if it needs no request."""
        for row in rows:
            line = self._decoder.decode(row.rest)
            name = f"{row.part}:{row.place}:{line.custom_id}"  # the same whenever the job is run
            number = hashlib.sha256(name.encode()).hexdigest()[:ID_DIGITS]
            record = RequestRecord(number, route=line.url)
            try:
                scored = self._prepared(line, record)
            except GpuscoreError as error:
                yield Unit([row], None, [_refused(line, record, error)])
                continue
            if scored.prepared.request is None:
                yield Unit([row], None, [_answered(line, scored)])
            else:
                yield Unit([row], scored.prepared.request, notes=(line, scored))

    def results(self, unit: Unit, result: ScoreResult) -> Sequence[Result]:
        line, scored = unit.notes
        return [_answered(line, replace(scored, result=result))]

    def failed(self, unit: Unit, error: GpuscoreError) -> Iterator[Unit]:
        line, scored = unit.notes
        places = scored_places(scored.prepared.errors, scored.body.num_items)
        yield Unit(unit.rows, None, [_refused(line, scored.record, renumbered(error, places))])

    def _prepared(self, line: RequestLine, record: RequestRecord) -> Scored[Any]:
        """Take the server's steps up to the engine; raise GpuscoreError as they do."""
        dialect = DIALECT_OF.get(line.url)
        if dialect is None:
            raise NotFound("no such path")
        if line.method != "POST":
            raise MethodNotAllowed("this path does not have that method")
        body = dialect.decode(bytes(line.body), record, None)
        name = answered_name(choose(self._models, dialect, body), body)
        return Scored(body, dialect.prepare(self._model, body), None, name, record)


def _line_texts(row: Decoded, line: Any) -> Texts:
    if isinstance(row, str):
        return row
    for name in ("custom_id", "method", "url"):
        if not isinstance(row.get(name), str):
            return f"{name} must be text"
    if not isinstance(row.get("body"), dict):
        return "body must be an object"
    query = row["body"].get("query")
    return query if isinstance(query, str) else "", line.decode()


def _answered(line: RequestLine, scored: Scored[Any]) -> Answer:
    try:
        body = b"".join(DIALECT_OF[line.url].encode(scored))
    except GpuscoreError as error:
        return _refused(line, scored.record, error)
    return _answer(line, scored.record, OK, body)


def _refused(line: RequestLine, record: RequestRecord, error: GpuscoreError) -> Answer:
    return _answer(line, record, error.status, error_json(error, record))


def _answer(line: RequestLine, record: RequestRecord, status: int, body: bytes) -> Answer:
    """Return a line of the output; its error is null, because the body has the server's error."""
    number = record.request_id
    response = {"status_code": status, "request_id": number, "body": msgspec.Raw(body)}
    names = {"id": f"batch_req_{number}", "custom_id": line.custom_id}
    return Answer(msgspec.json.encode({**names, "response": response, "error": None}), status != OK)


Task: TypeAlias = TableTask | RequestTask
