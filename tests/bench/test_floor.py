"""Promise: `make bench-cpu` compares scorers with a floor measured in the same run, and with one
another round by round."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from ceiling import operations
from cpu import FLOOR, check, compare
from random_models import SHAPES, make_model
from scenarios import Workload

WORK = Workload(30, 4, 5, requests=2)


def test_times_are_compared_with_the_floor_and_the_first_scorer():
    def burn(seconds):
        def score(query, items):
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass

        return score

    scorers = {"ours": burn(0.1), "twice": burn(0.2)}
    found = compare(scorers, SHAPES["tiny"], torch.float32, WORK, repeat=1)
    rows = {row["scorer"]: row for row in found["rows"]}
    assert list(rows) == [FLOOR, *scorers]
    (floor,) = found["floors"]
    assert floor["linear TFLOP/s"] > 0
    wall = 8 / rows["ours"]["items/s"]
    assert 0.2 <= wall < 5
    assert rows["ours"]["CPU s"] == pytest.approx(0.2, rel=0.3)
    assert rows["ours"]["of the floor"] == pytest.approx(floor["seconds"] / wall, abs=1e-3)
    assert rows["twice"]["CPU / gpuscore's"] == pytest.approx(2, rel=0.3)


def test_a_wrong_scorer_ends_the_bench(tmp_path):
    directory = make_model("tiny", "float32", tmp_path)
    none = {"wrong": lambda query, items: np.zeros((len(items), 2))}
    with pytest.raises(SystemExit, match="nothing is timed"):
        check(none, SHAPES["tiny"], directory, torch.float32, {"w": WORK})


def test_operations_with_a_cache_are_those_without_less_the_queries_own():
    shape, sizes = SHAPES["small"], (300, 7, 11)
    whole, rest = operations(shape, *sizes), operations(shape, *sizes, cached=300)
    alone = operations(shape, 300, 0, 0)
    assert whole["head"] == rest["head"]
    for kind in ("linear", "attention"):
        assert whole[kind] == pytest.approx(rest[kind] + alone[kind])
