"""Scores as a step of a Ray Data pipeline."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuscore.errors import InvalidRequest
from gpuscore.offline.results import PairScores, Scores
from gpuscore.offline.scorer import Scorer
from gpuscore.types import item_errors
from gpuscore.types.call_arguments import listed

# A batch as Ray Data passes it with batch_format="numpy".
Columns = dict[str, NDArray[Any]]
QUERIES = 32  # queries whose rows are in the engine at a time


class ScoreBatches:
    """A callable class for `map_batches`: adds the column `scores` to rows with the texts `query`
    and `item`, with one engine for each actor.

    Rows of a batch with the same query share its computation, so sort or group by it beforehand.

    Args:
        model: directory, hub name or `demo`.
        labels: the scores are their probabilities after query + item, float64 [labels]; None: the
            score is the relevance of the model's prompt family, float64.
        apply_softmax: softmax over the labels, instead of probabilities over the whole vocabulary.
        on_error: "fail": a row that cannot be scored ends the step. "null": it gets NaN, and the
            reason is in a column `error`, which is empty in all other rows.
        settings: settings of `Scorer`, such as `threads` or `dtype`.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        labels: list[str] | None = None,
        apply_softmax: bool = False,
        on_error: item_errors.OnError = "fail",
        **settings: Any,
    ) -> None:
        self._fails = not item_errors.check_on_error(on_error)
        self._labels = labels
        self._options: Any = {"on_error": on_error}
        if labels is not None:
            self._options |= {"labels": labels, "apply_softmax": apply_softmax}
        self._scorer = Scorer(model, **settings)

    def __call__(self, batch: Columns) -> Columns:
        """Return the batch with the added columns.

        Raises:
            InvalidRequest: the batch has such a column already.
            GpuscoreError: a row cannot be scored, and `on_error` is "fail".
        """
        names = ["scores"] if self._fails else ["scores", "error"]
        for name in names:
            if name in batch:
                raise InvalidRequest(f"the rows already have a column {name}; rename it first")
        errors = None if self._fails else item_errors.ItemErrors()
        queries, items = (
            item_errors.checked_texts(listed(batch[name], name), name, errors)
            for name in ("query", "item")
        )
        reasons = np.full(len(items), "", object)
        for error in errors.listed() if errors else ():
            reasons[error.index] = _reason(error, f"[{error.index}]", "")
        # Rows of one call: all rows, or with labels the rows of one query.
        groups = defaultdict[str, list[int]](list)
        for row in np.flatnonzero(reasons == "").tolist():
            groups["" if self._labels is None else queries[row]].append(row)
        width = () if self._labels is None else (len(self._labels),)
        scores = np.full((len(items), *width), np.nan)
        with ThreadPoolExecutor(QUERIES) as pool:
            pairs = ([(queries[row], items[row]) for row in rows] for rows in groups.values())
            for rows, result in zip(groups.values(), pool.map(self._score, pairs), strict=True):
                scores[rows] = result.scores
                for error in result.errors:
                    name = "pairs" if self._labels is None else "items"
                    reasons[rows[error.index]] = _reason(error, f"{name}[{error.index}]", "the row")
        return batch | dict(zip(names, (scores, reasons), strict=False))

    def _score(self, pairs: list[tuple[str, str]]) -> Scores | PairScores:
        if self._labels is None:
            return self._scorer.score_pairs(pairs, **self._options)
        try:
            return self._scorer.score(pairs[0][0], [item for _, item in pairs], **self._options)
        except item_errors.ITEM_ERRORS as error:
            if self._fails or error.param != "query":  # an error of the labels ends the step
                raise
            # If a query is too long, none of its rows can be scored.
            errors = tuple(
                item_errors.ItemError(n, error.code, error.message) for n in range(len(pairs))
            )
            return Scores(
                np.array(np.nan), None, None, prompt_tokens=0, cached_tokens=0, errors=errors
            )


def _reason(error: item_errors.ItemError, place: str, shown: str) -> str:
    """Return an error's text, in which `shown` replaces the row's place in a list."""
    return f"{error.code}: {error.message.replace(place, shown, 1)}"
