"""From rows to requests of the engine, and from its results to scores."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.rows import BadTextRow, RowScoring, Settled, TextRow
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError, GpuscoreError
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import label_scores, per_token, softmax
from gpuscore.types.request import ScoreRequest, ScoreResult

_INDEX = re.compile(r"\[(\d+)\]$")  # of the item that an error is about


@dataclass(frozen=True, slots=True)
class Unit:
    """A request to the engine, and the rows that it answers."""

    rows: Sequence[TextRow]
    request: ScoreRequest
    notes: Any = None  # of the task that made it
    losses: int = 0  # of engines that had it in flight


class Task(Protocol):
    """A kind of job."""

    @property
    def width(self) -> int:
        """Number of scores of a row; 1 for texts."""

    def units(self, rows: Sequence[TextRow]) -> Iterator[Unit | Settled]:
        """Yield requests for neighbouring rows, and the outcomes that are known without one."""

    def settle(self, unit: Unit, result: ScoreResult) -> Settled:
        """Return the outcome of the unit's rows."""

    def failed(self, unit: Unit, error: GpuscoreError) -> Iterator[Unit | Settled]:
        """Yield smaller requests instead of one that failed, or the outcome of a single row."""


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
        """Yield the request of the rows; rows that it is refused for are settled as bad, and the
        others get requests without them."""
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
    """Divide the rows at the one that the error names, or else in the middle."""
    found = _INDEX.search(error.param or "")
    index = int(found[1]) if found else len(rows)
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

    def given(first: str, items: Sequence[str]) -> ScoreInput:
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
        request = builder.build(given(first.decode(), [item.decode() for item in items]))
        assert request is not None  # noqa: S101  (there is a row)
        return request

    def scores(request: ScoreRequest, result: ScoreResult) -> Float64Array:
        shown = per_token(result, request.trie) if mean else result
        found = label_scores(shown, apply_softmax=apply, temperature=options.temperature)
        return np.stack(found)

    builder.build(given("", []))  # checks the labels only
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
