"""Scores as a step of a Ray Data pipeline."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuscore.errors import InvalidRequest
from gpuscore.offline.scorer import Scorer
from gpuscore.types.call_arguments import listed
from gpuscore.types.results import (
    OF_ITEMS,
    ItemError,
    ItemErrors,
    OnError,
    PairScores,
    Scores,
    check_on_error,
    checked_texts,
)

# A batch as Ray Data passes it with batch_format="numpy".
Columns = dict[str, NDArray[Any]]
ERROR = "error"  # the column of the reasons
QUERIES = 32  # whose rows are in the engine at a time


class ScoreBatches:
    """A callable class for `map_batches`: adds a column of scores, with one engine for each actor.

        ds.map_batches(
            ScoreBatches,
            fn_constructor_args=["Qwen/Qwen3-0.6B"],
            fn_constructor_kwargs={"labels": ["yes", "no"], "on_error": "null"},
            batch_size=1024, num_gpus=1, compute=ray.data.ActorPoolStrategy(size=8),
        )

    Rows of a batch with the same query share its computation, so sort or group by it beforehand.

    Args:
        model: directory, hub name or `demo`.
        query_column, item_column: names of the texts' columns.
        labels: whose probabilities after query + item are the scores; None: the score is the
            relevance of the model's prompt family.
        apply_softmax: softmax over the labels, instead of probabilities over the whole vocabulary.
        output_column: gets lists of float64 [labels], or float64 without labels.
        on_error: "null": a row that cannot be scored gets NaN, and a column `error` is added, with
            the reason, or an empty text for a row with scores. "fail": it ends the step.
        settings: of `Scorer`, such as `threads` or `dtype`.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        query_column: str = "query",
        item_column: str = "item",
        labels: list[str] | None = None,
        apply_softmax: bool = False,
        output_column: str = "scores",
        on_error: OnError = "fail",
        **settings: Any,
    ) -> None:
        self._fails = not check_on_error(on_error)
        self._added = [output_column] if self._fails else [output_column, ERROR]
        # No actor knows what another one would measure.
        self._scorer = Scorer(model, **{"dtype": "checkpoint"} | settings)
        self._texts, self._on_error = (query_column, item_column), on_error
        self._labels, self._apply_softmax = labels, apply_softmax

    def __call__(self, batch: Columns) -> Columns:
        """Return the batch with the columns that are added.

        Raises:
            InvalidRequest: the batch has such a column already.
            GpuscoreError: a row cannot be scored, and `on_error` is "fail".
        """
        for name in self._added:
            if name in batch:
                raise InvalidRequest(f"the rows have a column {name} already; rename it before")
        unread = None if self._fails else ItemErrors()
        queries, items = (
            checked_texts(listed(batch[name], name), name, unread) for name in self._texts
        )
        reasons = np.full(len(items), "", object)
        for error in unread.listed() if unread else ():
            reasons[error.index] = _reason(error, f"[{error.index}]", "")
        # Rows that are scored together: all of them, or with labels those of a query.
        groups = defaultdict[str, list[int]](list)
        for row in np.flatnonzero(reasons == "").tolist():
            groups["" if self._labels is None else queries[row]].append(row)
        width = () if self._labels is None else (len(self._labels),)
        scores = np.full((len(items), *width), np.nan)
        with ThreadPoolExecutor(QUERIES) as pool:
            pairs = ([(queries[row], items[row]) for row in rows] for rows in groups.values())
            results = pool.map(self._score, pairs)
            for rows, result in zip(groups.values(), results, strict=True):
                scores[rows] = result.scores
                for error in result.errors:
                    name = "pairs" if self._labels is None else "items"
                    reasons[rows[error.index]] = _reason(error, f"{name}[{error.index}]", "the row")
        return {**batch, **dict(zip(self._added, (scores, reasons), strict=False))}

    def _score(self, pairs: list[tuple[str, str]]) -> Scores | PairScores:
        if self._labels is None:
            return self._scorer.score_pairs(pairs, on_error=self._on_error)
        try:
            return self._scorer.score(
                pairs[0][0],
                [item for _, item in pairs],
                labels=self._labels,
                apply_softmax=self._apply_softmax,
                on_error=self._on_error,
            )
        except OF_ITEMS as error:
            if self._fails or error.param != "query":  # such as of labels, which all rows share
                raise
            # A query that is too long, or empty, makes all its rows bad ones.
            errors = tuple(ItemError(n, error.code, error.message) for n in range(len(pairs)))
            return Scores(np.array(np.nan), None, None, 0, 0, errors=errors)


def _reason(error: ItemError, place: str, shown: str) -> str:
    """Return an error's text, with other words for the row's place in a list."""
    return f"{error.code}: {error.message.replace(place, shown, 1)}"
