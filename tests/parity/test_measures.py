"""Promise: the measures follow their definitions, and their intervals hold the truth as often as
they say."""

import math

import numpy as np
import pytest

from gpuscore.measure.intervals import FEWEST, RESAMPLES, Interval, Resamples
from gpuscore.measure.parity.measures import (
    best_labels,
    by_length,
    by_query,
    divergence,
    threshold_flips,
)
from gpuscore.measure.parity.metrics import errors
from gpuscore.measure.parity.results import CaseResult, Run
from gpuscore.measure.parity.workload import Case, Workload


def workload(*cases):
    return Workload("made up", 0, 1, 60, 9, cases)


def run(**values):
    return Run(
        "made",
        "float32",
        {name: CaseResult(np.array(v, float), None) for name, v in values.items()},
    )


class TestMeasures:
    def test_flips_of_the_best_label(self):
        cases = workload(
            Case("a", [1], [[5], [6], [7]], [[1, 2, 3]] * 3), Case("b", [1], [[5]], [[1]])
        )
        expected = run(a=[[-1, -2, -3], [-1, -2, -3], [-3, -2, -1]], b=[[-1]])
        got = run(a=[[-1, -2, -9], [-2.1, -2, -3], [-3, -2, np.nan]], b=[[-7]])
        np.testing.assert_array_equal(best_labels(cases, expected, got).values, [0, 1, 1])

    def test_flips_of_a_threshold(self):
        cases = workload(Case("a", [1], [[n] for n in range(11)], [[1]] * 11))
        expected = run(a=np.arange(11.0)[:, None])
        for moved, flips in (([5, 4], 2), ([9, 10], 0), ([0, 10], 2)):
            values = np.arange(11.0)
            values[moved] = values[moved[::-1]]
            got = run(a=values[:, None])
            assert threshold_flips(cases, expected, got).values.sum() == flips
        assert threshold_flips(cases, expected, expected).values.sum() == 0

    def test_divergence_over_labels(self):
        """Labels are a distribution of their own, each counted once; one label has none."""
        cases = workload(Case("a", [1], [[5], [6], [7]], [[1, 2], [1, 1, 2], [3]]))
        expected = run(a=[[-1, -2, np.nan], [-1, -1, -2], [-1, np.nan, np.nan]])
        got = run(a=[[-5, -5, np.nan], [-5, -5, -5], [-9, np.nan, np.nan]])
        p = 1 / (1 + math.exp(-1))
        kl = p * math.log(p / 0.5) + (1 - p) * math.log((1 - p) / 0.5)
        np.testing.assert_allclose(divergence(cases, expected, got).values, [kl, kl])

    def test_lengths(self):
        cases = workload(
            Case("a", [1, 2], [[5], [6, 7, 8]], [[1, 2], [3]]),
            Case("b", "q", ["x"], [[1]], ["y"], prompts=[[1, 2, 3, 4]]),
        )
        expected = run(a=[[0, 0], [0, np.nan]], b=[[0]])
        got = run(a=[[1, 2], [3, np.nan]], b=[[4]])
        lengths = by_length(cases, expected, got)
        np.testing.assert_array_equal(lengths.log_p, [1, 2, 3, 4])
        np.testing.assert_array_equal(lengths.prompt, [3, 3, 5, 4])
        np.testing.assert_array_equal(lengths.item, [1, 1, 3, np.nan])

    def test_all_of_them_by_query(self):
        """Two cases with the same query count as one of seven queries; a shift of all scores is a
        bias."""
        cases = [Case(f"{n}", [n], [[k] for k in range(12)], [[1, 2]] * 12) for n in range(7)]
        cases.append(Case("again", [3], [[9]], [[1, 2]]))
        rng = np.random.default_rng(0)
        values = {case.name: -5 + rng.normal(size=(len(case.items), 2)) for case in cases}
        moved = {name: v - 0.25 + 0.001 * rng.normal(size=v.shape) for name, v in values.items()}
        made, expected, got = workload(*cases), run(**values), run(**moved)
        count, intervals = by_query(made, expected, got)
        assert count == 7
        bias = intervals["bias of log p"]
        assert bias.low < -0.25 < bias.high or abs(bias.value + 0.25) < 1e-3
        assert intervals["mean |d log p|"].value == pytest.approx(0.25, abs=1e-3)
        differences = np.concatenate([(moved[c.name] - values[c.name]).ravel() for c in cases])
        assert intervals["p99 |d log p|"].value == errors(differences).p99
        assert intervals["mean tau-b"].value > 0.99
        assert intervals["KL over labels"].value < 1e-5
        assert intervals["best label flips"].value <= 0.02


class TestIntervals:
    QUERIES, EACH = 30, 8

    def drawn(self, rng):
        """Return values of queries that err together: an error of the query, and one of its own."""
        of_query = rng.normal(size=self.QUERIES)
        own = 0.3 * rng.normal(size=(self.QUERIES, self.EACH))
        numbers = np.repeat(np.arange(self.QUERIES), self.EACH)
        return (of_query[:, None] + own).ravel(), numbers

    def test_they_hold_the_true_mean_as_often_as_they_say(self):
        rng, resamples = np.random.default_rng(0), Resamples(self.QUERIES)
        measured = [resamples.mean(*self.drawn(rng)) for _ in range(400)]
        held = np.mean([interval.low <= 0 <= interval.high for interval in measured])
        assert 0.89 <= held <= 0.97

    def test_values_taken_for_independent_would_promise_too_much(self):
        """The planted defect: a bootstrap over values instead of queries."""
        rng, resamples = np.random.default_rng(0), Resamples(self.QUERIES * self.EACH)
        held = []
        for _ in range(200):
            values, _ = self.drawn(rng)
            interval = resamples.mean(values, np.arange(len(values)))
            held.append(interval.low <= 0 <= interval.high)
        assert np.mean(held) < 0.7

    @pytest.mark.parametrize("q", [0.5, 0.99])
    def test_a_quantile_is_that_of_the_repeated_values(self, q):
        """It equals the quantile of each query's values, repeated as often as the query was
        drawn."""
        rng, resamples = np.random.default_rng(1), Resamples(6)
        values, numbers = rng.random(50), rng.integers(0, 6, 50)
        measured = resamples.quantile(values, numbers, q)
        assert measured.value == np.percentile(values, 100 * q, method="higher")
        weights = np.random.RandomState(0).multinomial(6, [1 / 6] * 6, RESAMPLES)
        written_out = [
            np.percentile(np.repeat(values, drawn[numbers]), 100 * q, method="higher")
            for drawn in weights
            if drawn[numbers].any()
        ]
        low, high = np.percentile(written_out, (2.5, 97.5))
        assert (measured.low, measured.high) == (low, high)

    def test_too_few_queries_and_errors_without_a_size_have_none(self):
        few = Resamples(FEWEST - 1).mean(np.arange(4.0), np.arange(4))
        assert f"{few:.2g}" == "1.5"
        wrong = np.array([1.0, np.nan, 1, 1, 1, 1])
        assert math.isnan(Resamples(6).mean(wrong, np.arange(6)).low)
        assert f"{Resamples(6).mean(np.empty(0), np.empty(0, int)):.2g}" == "-"
        assert f"{Interval(1.0, 0.5, 2.0):.2g}" == "1 (0.5 to 2)"
