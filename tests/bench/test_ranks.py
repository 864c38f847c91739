"""Promise: `bench/ranks.py` times nothing unless one process and two ranks agree, and prints
medians beside CPU-seconds of all processes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import ranks
import report
from spent import Spent


class Answering:
    """Answers every request with the same scores."""

    def __init__(self, *scores):
        self.scores = np.array([scores])

    def score(self, requests):
        return [self.scores for _ in requests], Spent(1.0, 1.0)


@pytest.mark.parametrize(("off", "agrees"), [(5e-5, True), (2e-4, False), (np.nan, False)])
def test_nothing_is_timed_unless_all_agree(off, agrees):
    peers = {ranks.FIRST: Answering(-1.0, -2.0), "other": Answering(-1.0, -2.0 + off)}
    if agrees:
        assert ranks.check(peers, [([1], [[2]])]) == pytest.approx(off)
        return
    with pytest.raises(SystemExit, match="nothing is timed"):
        ranks.check(peers, [([1], [[2]])])


def test_rows_are_medians_and_ratios_are_of_one_round():
    taken = {ranks.FIRST: [(2.0, 2.0), (9.0, 3.0), (4.0, 4.0)], "two": [(1, 3), (3, 3), (8, 4)]}
    rounds = [{name: Spent(*taken[name][turn]) for name in taken} for turn in range(3)]
    assert ranks.row("two", rounds, 30) == {
        "scorer": "two",
        "wall s": 3,
        "least": 1,
        "CPU s": 3,
        "items/s": 10.0,
        "speed-up": 2.0,  # of 2, 3 and 0.5
        "CPU / first's": 1.0,  # of 1.5, 1 and 1
    }


@pytest.mark.slow
def test_two_real_ranks_are_timed_beside_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(ranks, "SCRATCH", tmp_path)
    arguments = ["ranks.py", "--shape", "tiny", "--workload", "single", "--repeat", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    ranks.main()
    kept = json.loads((tmp_path / "results" / "ranks.jsonl").read_text())
    assert [row["scorer"] for row in kept["rows"]] == list(ranks.SCORERS)
    assert kept["max d log p"] <= ranks.TOLERANCE
    assert report.table(kept["rows"]) in capsys.readouterr().out
