"""Promise: `ScoreBatches` adds to a Ray Data pipeline the scores that `Scorer` gives."""

from typing import Any

import pytest
import ray.data
from ray.cluster_utils import Cluster

from batch_runs import make_rows
from gpuscore import Scorer
from gpuscore.ray import ScoreBatches

ROWS = make_rows(200, queries=40)


def scored(engines: int, **settings: Any) -> list[dict[str, Any]]:
    """Return the rows after a step of so many engines, in the order of their numbers."""
    scored_rows = ray.data.from_items(ROWS).map_batches(
        ScoreBatches,
        fn_constructor_kwargs={"threads": 1, "max_batch_tokens": 512, **settings},
        batch_size=64,
        num_cpus=1,
        concurrency=engines,
    )
    return sorted(scored_rows.take_all(), key=lambda row: int(row["id"]))


def test_scores_of_labels(cluster: Cluster) -> None:
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        prompts = [row["query"] + row["item"] for row in ROWS]
        wanted = scorer.score("", prompts, labels=["yes", "no"]).scores
    rows = scored(2, labels=["yes", "no"], output_column="both")
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    for row, scores in zip(rows, wanted, strict=True):
        assert list(row["both"]) == pytest.approx(scores, abs=1e-5)


def test_relevance(cluster: Cluster) -> None:
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        wanted = scorer.score_pairs([(row["query"], row["item"]) for row in ROWS]).scores
    assert [row["scores"] for row in scored(1)] == pytest.approx(list(wanted), abs=1e-5)
