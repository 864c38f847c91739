"""From rows to requests of the engine, and from its results to scores."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuscore.commands.bulk.inputs import Problem
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.work import Result
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError, GpuscoreError
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import label_scores, per_token, softmax
from gpuscore.types.request import ScoreRequest, ScoreResult

GROUP_ROWS = 2048  # most rows of one request
# Most characters of one request, for each token of a batch: about two batches, so that results come
# in steps of seconds on a slow machine, too.
GROUP_TEXT = 8
# Characters, a few pages of tokens: neighbours go into separate requests if prompts on one side
# begin alike for that much longer, so that each request's prompts share all of it.
WORTHWHILE = 256
_INDEX = re.compile(r"\[(\d+)\]$")  # of the item that an error is about


class Row(NamedTuple):
    """A row's texts. Rows sort by them, so rows that begin alike become neighbours."""

    first: str  # rows with the same first text become one request
    rest: str
    part: int
    index: int  # in its part


_END = Row("", "", -1, -1)


class Settled(NamedTuple):
    """The results of some rows."""

    rows: Sequence[Row]
    results: Sequence[Result]


@dataclass(frozen=True, slots=True)
class Unit:
    """A request to the engine, and the rows that it answers."""

    rows: Sequence[Row]
    request: ScoreRequest
    notes: Any = None  # of the task that made it
    losses: int = 0  # of engines that had it in flight


class Task(Protocol):
    """The work of a job on its rows."""

    def texts(self, block: Any) -> "list[tuple[str, ...] | Problem]":
        """Return one text or two of every row of a block, or what is wrong with it."""

    def units(self, rows: Sequence[Row]) -> Iterator[Unit | Settled]:
        """Yield requests for the rows, and the results of rows that need none."""

    def settle(self, unit: Unit, result: ScoreResult) -> Settled:
        """Return the results of a request's rows."""

    def failed(self, unit: Unit, error: GpuscoreError) -> Iterator[Unit | Settled]:
        """Yield smaller requests in place of a failed request, or the outcome of a single row."""


def grouped(
    rows: Iterable[Row], most_rows: int, batch_tokens: int, free_cut: bool = True
) -> Iterator[list[Row]]:
    """Yield neighbouring rows whose prompts go into one request: rows with the same first text, or,
    to save requests, rows that each have a first text of their own.

    Args:
        rows: in order.
        most_rows: of one group.
        batch_tokens: tokens of one batch of the engine, which bound a group's text.
        free_cut: a request's prompts share all that they begin with, not only what their first text
            alone determines; then rows of several first texts may be put together.
    """
    most_rows, most_text = min(GROUP_ROWS, most_rows), GROUP_TEXT * batch_tokens
    group: list[Row] = []
    size = before = here = 0  # characters shared with the row before, for the last row and this one
    last, singles = _END, False  # the row before, and whether the group's first texts differ
    for row, following in pairwise(chain(rows, [_END])):
        after = _shared(row, following) if free_cut else 0
        single = free_cut and row.first not in (last.first, following.first)
        length = len(row.rest) + (len(row.first) if single else 0)
        if group:
            fits = row.first == last.first or (single and singles)
            full = len(group) >= most_rows or size + length > most_text
            if not fits or full or here + WORTHWHILE <= max(before, after):
                yield group
                group, size = [], 0
        group.append(row)
        singles, size = single, size + length
        last, before, here = row, here, after
    if group:
        yield group


def _shared(row: Row, following: Row) -> int:
    """Return how many first characters two prompts share; a few count as 0."""
    if following is _END:
        return 0
    if row.first != following.first:
        return _alike(row.first, following.first)
    return len(row.first) + _alike(row.rest, following.rest)


def _alike(a: str, b: str) -> int:
    if a[:WORTHWHILE] != b[:WORTHWHILE]:
        return 0
    least, most = 0, min(len(a), len(b)) + 1  # alike up to `least`, not up to `most`
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if a[:middle] == b[:middle] else (least, middle)
    return least


class TableTask:
    """The scores of a table's rows.

    Args:
        build: makes the request of a group of rows; raises GpuscoreError.
        scores: returns [rows, labels] of a request's result.
    """

    def __init__(
        self,
        options: BatchOptions,
        build: Callable[[Sequence[Row]], ScoreRequest],
        scores: Callable[[ScoreRequest, ScoreResult], Float64Array],
    ) -> None:
        self._options, self._build, self._scores = options, build, scores

    def texts(self, block: Any) -> "list[tuple[str, ...] | Problem]":
        texts: list[tuple[str, ...] | Problem] = block.texts(self._options)
        return texts

    def units(self, rows: Sequence[Row]) -> Iterator[Unit | Settled]:
        """Yield the request of the rows. If some rows make it invalid, they are settled as bad, and
        the other rows get requests without them."""
        waiting = [rows]
        while waiting:
            part = waiting.pop()
            try:
                yield Unit(part, self._build(part))
            except GpuscoreError as error:
                if len(part) == 1:
                    yield Settled(part, [_reason(error)])
                else:
                    waiting += reversed(_divided(part, error))

    def settle(self, unit: Unit, result: ScoreResult) -> Settled:
        return Settled(unit.rows, self._scores(unit.request, result).tolist())

    def failed(self, unit: Unit, error: GpuscoreError) -> Iterator[Unit | Settled]:
        if len(unit.rows) == 1:
            yield Settled(unit.rows, [_reason(error)])
            return
        for part in _divided(unit.rows, error):
            yield from self.units(part)


def _reason(error: GpuscoreError) -> str:
    message = error.message
    if error.param is not None and _INDEX.search(error.param):
        message = message.replace(error.param, "the row")  # not the item's number in a request
    return f"{error.code}: {message}"


def _divided(rows: Sequence[Row], error: GpuscoreError) -> list[Sequence[Row]]:
    """Divide the rows at the row that the error names, or else in the middle."""
    match = _INDEX.search(error.param or "")
    index = int(match[1]) if match else len(rows)
    cuts = [index, index + 1] if index < len(rows) else [len(rows) // 2]
    return [rows[start:end] for start, end in pairwise([0, *cuts, len(rows)]) if start < end]


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

    def build(rows: Sequence[Row]) -> ScoreRequest:
        first, items = rows[0].first, [row.rest for row in rows]
        if any(row.first != first for row in rows):
            first, items = "", [row.first + row.rest for row in rows]
        request = builder.build(score_input(first, items))
        assert request is not None  # noqa: S101  (there is a row)
        return request

    def scores(request: ScoreRequest, result: ScoreResult) -> Float64Array:
        shown = per_token(result, request.trie) if mean else result
        rows = label_scores(shown, apply_softmax=apply, temperature=options.temperature)
        return np.stack(rows)

    builder.build(score_input("", []))  # checks the labels only
    return TableTask(options, build, scores)


def _family_task(options: BatchOptions, prompts: FamilyPrompts) -> TableTask:
    family, asks = prompts.family, options.query_column is not None
    if family.ranks and not asks:
        raise ConfigError(f"--query-column is missing: prompts of {family.name} need a query")
    if asks and family.classes and not family.answering_parts:
        raise ConfigError(f"--query-column: prompts of {family.name} have no query")
    if options.instruction is not None and not family.takes_instruction:
        raise ConfigError(f"--instruction: prompts of {family.name} have no instruction")

    def build(rows: Sequence[Row]) -> ScoreRequest:
        query = [row.first for row in rows] if asks else None
        documents = [row.rest for row in rows]
        return prompts.build(RerankInput(query, documents, options.instruction)).request

    def relevance(_: ScoreRequest, result: ScoreResult) -> Float64Array:
        return family.relevance(prompts.raw_scores(result))[:, None]

    def classes(_: ScoreRequest, result: ScoreResult) -> Float64Array:
        return softmax(np.stack(result.label_logits).astype(np.float64))

    return TableTask(options, build, relevance if family.ranks else classes)
