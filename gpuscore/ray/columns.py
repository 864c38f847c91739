"""Scores as a step of a Ray Data pipeline."""

from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuscore.offline.scorer import Scorer
from gpuscore.types.call_arguments import texts

# A batch as Ray Data passes it with batch_format="numpy".
Columns = dict[str, NDArray[Any]]


class ScoreBatches:
    """A callable class for `map_batches`: adds a column of scores, with one engine for each actor.

        ds.map_batches(
            ScoreBatches,
            fn_constructor_args=["Qwen/Qwen3-0.6B"],
            fn_constructor_kwargs={"labels": ["yes", "no"]},
            batch_size=1024, num_gpus=1, concurrency=8,
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
        **settings: Any,
    ) -> None:
        # No actor knows what another one would measure.
        self._scorer = Scorer(model, **{"dtype": "checkpoint"} | settings)
        self._query, self._item, self._output = query_column, item_column, output_column
        self._labels, self._apply_softmax = labels, apply_softmax

    def __call__(self, batch: Columns) -> Columns:
        """Return the batch with the scores; raise GpuscoreError if a row cannot be scored."""
        queries, items = (texts(batch[name], name) for name in (self._query, self._item))
        pairs = list(zip(queries, items, strict=True))
        if self._labels is None:
            scores = self._scorer.score_pairs(pairs).scores
        else:
            scores = self._label_scores(pairs, self._labels)
        return {**batch, self._output: scores}

    def _label_scores(self, pairs: list[tuple[str, str]], labels: list[str]) -> NDArray[Any]:
        order = sorted(range(len(pairs)), key=lambda row: pairs[row][0])
        groups = [list(rows) for _, rows in groupby(order, key=lambda row: pairs[row][0])]
        asked = ((pairs[rows[0]][0], [pairs[row][1] for row in rows]) for rows in groups)
        scores = np.empty((len(pairs), len(labels)))
        softmax = self._apply_softmax
        results = self._scorer.score_many(asked, labels=labels, apply_softmax=softmax)
        for rows, result in zip(groups, results, strict=True):
            scores[rows] = result.scores
        return scores
