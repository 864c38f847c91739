"""Promise: `ScoreBatches` adds to a Ray Data pipeline the scores that `Scorer` gives; a bad row, a
lost actor and a lost node cost no other row its scores."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import ray.data
from ray.cluster_utils import Cluster

from applications import kill_an_actor
from gpuscore import Scorer
from gpuscore.ray import ScoreBatches
from nodes import NODE, patiently

QUICK = {"threads": 1, "max_batch_tokens": 512}
ENGINE = "scores"  # a resource of the nodes that are lost, one engine's


def make_rows(count: int, queries: int) -> list[dict[str, Any]]:
    """Return rows whose queries come in no order."""
    choose = random.Random(1)
    words = ("blue", "red", "wool", "lamp", "chair", "naïve ☃", "steel")
    return [
        {
            "id": number,
            "query": f"a {choose.choice(words)} {choose.randrange(queries)}",
            "item": f"A {choose.choice(words)} scarf, {choose.randrange(1000)}.",
        }
        for number in range(count)
    ]


ROWS = make_rows(200, queries=40)
MANY = make_rows(6000, queries=400)


def scored(engines: int, **settings: Any) -> list[dict[str, Any]]:
    """Return the rows after a step of so many engines, in the order of their numbers."""
    scored_rows = ray.data.from_items(ROWS).map_batches(
        ScoreBatches,
        fn_constructor_kwargs={**QUICK, **settings},
        batch_size=64,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=engines),
    )
    return sorted(scored_rows.take_all(), key=lambda row: int(row["id"]))


def alone(rows: list[dict[str, Any]]) -> Any:
    """Return the labels' scores of rows, without Ray."""
    with Scorer("demo", **QUICK) as scorer:
        prompts = [row["query"] + row["item"] for row in rows]
        return scorer.score("", prompts, labels=["yes", "no"]).scores


def test_scores_of_labels(cluster: Cluster) -> None:
    rows = scored(2, labels=["yes", "no"])
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    for row, scores in zip(rows, alone(ROWS), strict=True):
        assert list(row["scores"]) == pytest.approx(scores, abs=1e-5)


def test_relevance(cluster: Cluster) -> None:
    with Scorer("demo", **QUICK) as scorer:
        wanted = scorer.score_pairs([(row["query"], row["item"]) for row in ROWS]).scores
    assert [row["scores"] for row in scored(1)] == pytest.approx(list(wanted), abs=1e-5)


def test_a_bad_row_ends_no_job(cluster: Cluster, tmp_path: Any) -> None:
    """Parts without a bad row have the same columns as the others."""
    rows = [row | {"item": None if row["id"] == 70 else row["item"]} for row in ROWS]
    step = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        ScoreBatches,
        fn_constructor_kwargs={**QUICK, "labels": ["yes", "no"], "on_error": "null"},
        batch_size=64,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    step.write_parquet(str(tmp_path))
    read = ray.data.read_parquet(str(tmp_path)).take_all()
    read.sort(key=lambda row: int(row["id"]))
    assert [row["id"] for row in read] == [row["id"] for row in ROWS]
    (bad,) = (row for row in read if row["error"])
    assert (bad["id"], bad["error"]) == (70, "invalid_request: item is null; it must be a text")
    for row, scores in zip(read, alone(ROWS), strict=True):
        if row["id"] != 70:
            assert list(row["scores"]) == pytest.approx(scores, abs=1e-5)


@pytest.fixture
def two(cluster: Cluster) -> Iterator[list[Any]]:
    """Two more nodes, with room for one engine each."""
    own = NODE | {"resources": {ENGINE: 1}}
    nodes = [patiently(lambda: cluster.add_node(**own)) for _ in range(2)]
    yield nodes
    for node in nodes:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


def test_losses_lose_no_row(cluster: Cluster, two: list[Any]) -> None:
    """An actor, then a node are killed while both engines are at work; no node takes its place."""
    step = ray.data.from_items(MANY, override_num_blocks=120).map_batches(
        ScoreBatches,
        fn_constructor_kwargs={**QUICK, "labels": ["yes", "no"]},
        batch_size=50,
        num_cpus=0,
        resources={ENGINE: 1},
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    rows = []
    for row in step.iter_rows():
        rows.append(row)
        if len(rows) == 100:
            kill_an_actor()
        elif len(rows) == 1000:
            cluster.remove_node(two[1], allow_graceful=False)
    rows.sort(key=lambda row: int(row["id"]))
    assert [row["id"] for row in rows] == [row["id"] for row in MANY]
    for row, scores in zip(rows, alone(MANY), strict=True):
        assert list(row["scores"]) == pytest.approx(scores, abs=1e-5)
