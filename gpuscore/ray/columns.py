"""Scores as a step of a Ray Data pipeline."""

from collections.abc import Sequence
from itertools import groupby
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
    check_on_error,
    checked_texts,
)

# A batch as Ray Data passes it with batch_format="numpy".
Columns = dict[str, NDArray[Any]]
Pairs = Sequence[tuple[str, str]]
ERROR = "error"  # the column of the reasons


class ScoreBatches:
    """A callable class for `map_batches`: adds a column of scores, with one engine for each actor.

        ds.map_batches(
            ScoreBatches,
            fn_constructor_args=["Qwen/Qwen3-0.6B"],
            fn_constructor_kwargs={"labels": ["yes", "no"], "on_error": "null"},
            batch_size=1024, num_gpus=1, compute=ray.data.ActorPoolStrategy(size=8),
        )

    With `labels` a row's scores are the labels' probabilities after query + item, in their order;
    without, its one score is the relevance of the model's prompt family.
    Rows of a batch with the same query share its computation, so sort or group by it beforehand.

    Args:
        model: directory, hub name or `demo`.
        query_column, item_column: names of the texts' columns.
        labels: None: the score is the relevance.
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
        self._query, self._item, self._on_error = query_column, item_column, on_error
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
        errors = None if self._fails else ItemErrors()
        names = self._query, self._item
        queries, items = (checked_texts(listed(batch[name], name), name, errors) for name in names)
        reasons = [""] * len(items)
        for error in errors.listed() if errors else ():
            reasons[error.index] = _reason(error, f"[{error.index}]", "")
        rows = [row for row, reason in enumerate(reasons) if not reason]
        score = self._relevance if self._labels is None else self._label_scores
        scored, refused = score([(queries[row], items[row]) for row in rows])
        scores = np.full((len(items), *scored.shape[1:]), np.nan)
        scores[rows] = scored
        for place, reason in refused.items():
            reasons[rows[place]] = reason
        columns: Columns = dict(zip(self._added, (scores, np.array(reasons, object)), strict=False))
        return {**batch, **columns}

    def _relevance(self, pairs: Pairs) -> tuple[NDArray[Any], dict[int, str]]:
        """Return the scores of pairs, and why some have none, by their places."""
        result = self._scorer.score_pairs(pairs, on_error=self._on_error)
        return result.scores, {
            error.index: _reason(error, f"pairs[{error.index}]", "the row")
            for error in result.errors
        }

    def _label_scores(self, pairs: Pairs) -> tuple[NDArray[Any], dict[int, str]]:
        """Return the scores [pairs, labels], and why some have none, by their places."""
        labels = self._labels or []
        order = sorted(range(len(pairs)), key=lambda row: pairs[row][0])
        groups = [list(rows) for _, rows in groupby(order, key=lambda row: pairs[row][0])]
        scores, reasons, done = np.full((len(pairs), len(labels)), np.nan), dict[int, str](), 0
        while done < len(groups):
            asked = ((pairs[rows[0]][0], [pairs[row][1] for row in rows]) for rows in groups[done:])
            results = self._scorer.score_many(
                asked, labels=labels, apply_softmax=self._apply_softmax, on_error=self._on_error
            )
            try:
                for result in results:
                    scores[groups[done]] = result.scores
                    for error in result.errors:
                        name = f"items[{error.index}]"
                        reasons[groups[done][error.index]] = _reason(error, name, "the row")
                    done += 1
            except OF_ITEMS as error:  # of all rows of a query, such as one that is too long
                if self._fails or error.param != "query":  # such as of labels, which all rows share
                    raise
                reasons |= dict.fromkeys(groups[done], f"{error.code}: {error.message}")
                done += 1
        return scores, reasons


def _reason(error: ItemError, place: str, shown: str) -> str:
    """Return an error's text, with other words for the row's place in a list."""
    return f"{error.code}: {error.message.replace(place, shown, 1)}"
