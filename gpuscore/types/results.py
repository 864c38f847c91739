"""The results of `Scorer`'s methods, which those of the clients extend, and their tables."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from itertools import chain, count
from typing import Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from gpuscore.errors import ConfigError
from gpuscore.types.arrays import BoolArray, Float32Array, Float64Array
from gpuscore.types.item_errors import ItemError, spread

SHOWN_ROWS = 20  # of a table in a notebook
Document: TypeAlias = str | Mapping[str, Any]


class TokenCounts(TypedDict):
    """The numbers of tokens that every result has."""

    prompt_tokens: int
    cached_tokens: int


class Table(ABC):
    """The base of results that are tables."""

    __slots__ = ()

    @abstractmethod
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """Return the name and the values of each column."""

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each item or document.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ConfigError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(dict(self.columns()))

    def _repr_html_(self) -> str:
        """Return the first SHOWN_ROWS rows as an HTML table, which notebooks show."""
        columns = self.columns()
        total = max((len(values) for values in columns.values()), default=0)
        head = "".join(f"<th>{escape(str(name))}</th>" for name in columns)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{_cell(values[i])}</td>" for values in columns.values())
            + "</tr>"
            for i in range(min(total, SHOWN_ROWS))
        )
        more = f"<p>{total - SHOWN_ROWS} more rows</p>" if total > SHOWN_ROWS else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


@dataclass(frozen=True, slots=True)
class Scores(Table):
    """Results of `Scorer.score`, float64: rows belong to items, columns to labels.

    If items have different numbers of labels, `scores`, `logprobs` and `logits` are padded with NaN
    on the right. With `on_error="null"` the row of an item in `errors` is NaN.

    Attributes:
        scores: [N, labels], probabilities.
        logprobs: [N, labels], over the full vocabulary or all classes; None unless asked for.
        label_mass: [N], the probability of all labels of an item together; None unless `logprobs`
            was asked for.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        logits: [N, labels], as the model's head gives them; None unless asked for.
        labels: names of the columns: the labels' texts, or their ids; empty if items have labels of
            their own.
        errors: the items that were not scored; their tokens are not counted.
    """

    scores: Float64Array  # [N, labels]
    logprobs: Float64Array | None  # [N, labels]
    label_mass: Float64Array | None  # [N]
    prompt_tokens: int
    cached_tokens: int
    logits: Float64Array | None = None  # [N, labels]
    labels: tuple[str, ...] = ()
    errors: tuple[ItemError, ...] = ()

    def columns(self) -> Mapping[str, Sequence[Any]]:
        width = self.scores.shape[1] if self.scores.ndim > 1 else 0
        names = self.labels or tuple(f"label {index}" for index in range(width))
        more = {} if self.label_mass is None else {"label_mass": self.label_mass.tolist()}
        shown = enumerate(distinct(names[:width], more))
        return {name: self.scores[:, i].tolist() for i, name in shown} | more


@dataclass(frozen=True, slots=True)
class Ranking(Table):
    """A ranking of documents, best first; documents with equal scores keep the given order.

    With `on_error="null"` it leaves out the documents in `errors`, which have no rank.

    Attributes:
        indices: [n], each document's place in the given list.
        scores: [n], float64: relevance from 0 to 1, or raw scores if those were asked for.
        truncated: [n], True if the document was cut, as the call allowed.
        documents: [n], the given documents.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        errors: the documents that were not scored.
    """

    indices: NDArray[np.int64]  # [n]
    scores: Float64Array  # [n]
    truncated: BoolArray  # [n]
    documents: tuple[Document, ...]  # [n]
    prompt_tokens: int
    cached_tokens: int
    errors: tuple[ItemError, ...] = ()

    def columns(self) -> Mapping[str, Sequence[Any]]:
        return {
            "index": self.indices.tolist(),
            "score": self.scores.tolist(),
            "document": self.documents,
        }


@dataclass(frozen=True, slots=True)
class PairScores(Table):
    """Scores of pairs, in the given order.

    Attributes:
        scores: [N], float64: relevance from 0 to 1, or raw scores if those were asked for; NaN for
            a pair in `errors`.
        truncated: [N], True if the document was cut, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
        errors: with `on_error="null"`: the pairs that were not scored.
    """

    scores: Float64Array  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int
    errors: tuple[ItemError, ...] = ()

    def columns(self) -> Mapping[str, Sequence[Any]]:
        return {"score": self.scores.tolist()}


@dataclass(frozen=True, slots=True)
class Classification(Table):
    """Classes of texts, in the given order.

    Attributes:
        classes: names of the columns.
        probabilities: [N, classes], float64.
        best: [N], the most probable class of each text.
        truncated: [N], True if the text was cut, as the call allowed.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
    """

    classes: tuple[str, ...]
    probabilities: Float64Array  # [N, classes]
    best: tuple[str, ...]  # [N]
    truncated: BoolArray  # [N]
    prompt_tokens: int
    cached_tokens: int

    def columns(self) -> Mapping[str, Sequence[Any]]:
        names = enumerate(distinct(self.classes, ["class"]))
        columns = {name: self.probabilities[:, i].tolist() for i, name in names}
        return {"class": self.best} | columns


def rectangle(
    rows: Sequence[Sequence[float] | Float64Array | Float32Array | None], width: int
) -> Float64Array:
    """Return rows as float64 [N, most]; NaN fills the ends of shorter ones, and those without any.

    Args:
        rows: of any lengths.
        width: number of columns if there is no row with numbers.
    """
    most = max((len(row) for row in rows if row is not None), default=width if rows else 0)
    table = np.full((len(rows), most), np.nan)
    for target, row in zip(table, rows, strict=True):
        if row is not None:
            target[: len(row)] = row
    return table


def column(values: Float64Array | None, errors: Sequence[ItemError], count: int) -> Float64Array:
    """Return float64 [count]: the values in their order, and NaN in the places of errors."""
    spread_out = spread([] if values is None else values.tolist(), errors, count)
    return np.array([np.nan if value is None else value for value in spread_out], dtype=np.float64)


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Return names of columns that differ from each other and from those taken.

    One that repeats an earlier name gets a number: "yes", "yes (2)".
    """
    found, used = [], set(taken)
    for name in names:
        numbered = (f"{name} ({number})" for number in count(2))
        found.append(next(one for one in chain([name], numbered) if one not in used))
        used.add(found[-1])
    return found


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))
