"""Promise: the embedded model ranks far better than chance."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpuscore import Scorer

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "gpuscore" / "demo"
# Held-out ranking tasks, drawn by the tag before-demolition: a prompt's query, and graded items.
TASKS = [
    json.loads(line) for line in (ROOT / "tests/fixtures/demo_tasks.jsonl").read_text().splitlines()
]


def texts(task):
    return [text for text, _ in task["items"]]


def ndcg(scores, grades):
    """Return nDCG@10 with gains of 2^grade - 1."""
    discounts = np.log2(np.arange(2, 12))
    gains = 2.0 ** np.array(grades) - 1
    order = np.argsort(-np.array(scores), kind="stable")[:10]
    return (gains[order] / discounts).sum() / (np.sort(gains)[::-1][:10] / discounts).sum()


@pytest.fixture(scope="module")
def demo():
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        yield scorer


def test_it_ranks_far_better_than_chance(demo):
    rng = np.random.default_rng(0)
    ours, chance = [], []
    for task in TASKS:
        result = demo.score(task["query"], texts(task), labels=["yes", "no"])
        grades = [grade for _, grade in task["items"]]
        ours.append(ndcg(result.scores[:, 0], grades))
        chance.append(ndcg(rng.random(len(grades)), grades))
    assert np.mean(ours) >= 0.95
    assert np.mean(chance) < 0.7, "the tasks would be too easy to prove anything"


def test_the_labels_are_what_the_model_wants_to_say(demo):
    task = TASKS[0]
    result = demo.score(task["query"], texts(task), labels=["yes", "no"], logprobs=True)
    assert result.label_mass.min() > 0.95
