"""Promise: the numbers of the table follow their definitions, written out pair by pair; their
intervals hold the truth as often as they say."""

import itertools
import math

import numpy as np
import pytest

from gpuscore.measure.agreement import agree, inversions, kendall_tau_b, mass_error
from gpuscore.measure.intervals import FEWEST, Interval, mean, median, ratio
from gpuscore.measure.results import CaseResult, Measured, errors
from gpuscore.measure.workload import Case, Workload


def pairs(a, b):
    return itertools.combinations(list(zip(a, b, strict=True)), 2)


def tau_b(a, b):
    """Return Kendall's tau-b (1945), by the textbook formula with counts of tied pairs."""
    concordant = discordant = tied_a = tied_b = total = 0
    for (a1, b1), (a2, b2) in pairs(a, b):
        total += 1
        tied_a += a1 == a2
        tied_b += b1 == b2
        product = (a1 - a2) * (b1 - b2)
        concordant += product > 0
        discordant += product < 0
    return (concordant - discordant) / math.sqrt((total - tied_a) * (total - tied_b))


def inverted(expected, got, gap):
    """Return the swapped pairs that are over `gap` apart, and all of those."""
    clear = [pair for pair in pairs(expected, got) if abs(pair[0][0] - pair[1][0]) > gap]
    swapped = [1 for (w1, g1), (w2, g2) in clear if (w1 - w2) * (g1 - g2) < 0]
    return len(swapped), len(clear)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("values", [3, 6, 1000])  # few distinct values give many ties
def test_order_against_pairs(seed, values):
    rng = np.random.default_rng(seed)
    a, noise = rng.integers(0, values, 41), rng.integers(-2, 3, 41)
    a, b = a.astype(float), (a + noise).astype(float)
    assert kendall_tau_b(a, b) == pytest.approx(tau_b(a, b), abs=1e-12)
    for gap in (0.0, 1.0, 2.5):
        assert inversions(a, b, gap) == inverted(a, b, gap)


def test_a_constant_ranking_is_no_perfect_one():
    assert math.isnan(kendall_tau_b(np.arange(7.0), np.ones(7)))


def test_nan_and_infinity_are_no_small_errors():
    """A gate that asks whether NaN is over its limit would accept it."""
    for wrong in (np.nan, np.inf, -np.inf):
        assert errors(np.array([0.0] * 5 + [wrong])).maximum == np.inf
    assert errors(np.array([0.0, np.nan])).p99 == np.inf
    assert errors(np.array([])).maximum == 0


def scored(cases, values, mass=None):
    results = {
        name: CaseResult(np.array(v, float), None if mass is None else np.array(mass[name]))
        for name, v in values.items()
    }
    workload = Workload("made up", 0, 60, 9, tuple(cases))
    return Measured("made", "demo", workload=workload, results=results)


def test_all_of_it():
    """Two cases with the same query count as one of seven queries; ragged labels leave no trace;
    rankings are summed up by the worst one."""
    cases = [Case(f"{n}", [n], [[k] for k in range(12)], [[1, 2]] * 12) for n in range(7)]
    cases.append(Case("again", [3], [[9], [8]], [[1], [1, 2]]))
    rng = np.random.default_rng(0)
    values = {case.name: -5 + rng.normal(size=(len(case.items), 2)) for case in cases}
    values["again"][0, 1] = np.nan
    moved = {name: v - 0.25 + 0.001 * rng.normal(size=v.shape) for name, v in values.items()}
    moved["4"][[2, 3], 1] = moved["4"][[3, 2], 1]
    found = agree(scored(cases, values), scored(cases, moved), gap=0.01)
    differences = np.concatenate([(moved[c.name] - values[c.name]).ravel() for c in cases])
    sizes = np.sort(np.abs(differences[np.isfinite(differences)]))
    assert found.log_p.maximum == sizes[-1]
    assert found.log_p.median == pytest.approx(np.median(sizes), rel=0.01)
    assert found.mean.value == pytest.approx(sizes.mean())
    assert found.mean.low < sizes.mean() < found.mean.high
    worst = tau_b(values["4"][:, 1], moved["4"][:, 1])
    assert found.tau == pytest.approx(worst)
    assert found.inversions == inverted(values["4"][:, 1], moved["4"][:, 1], 0.01)[0] > 0
    p = [np.exp(moved[c.name]) - np.exp(values[c.name]) for c in cases]
    assert found.p == max(np.nanmax(np.abs(one)) for one in p)
    assert found.mass is None


def test_the_mass_is_the_sum_of_different_labels():
    cases = [Case("a", [1], [[5], [6]], [[1, 2, 2], [3]])]
    values = {"a": np.log([[0.1, 0.2, 0.2], [0.4, np.nan, np.nan]])}
    assert mass_error(scored(cases, values, {"a": [0.3, 0.4]})) == pytest.approx(0, abs=1e-12)
    assert mass_error(scored(cases, values, {"a": [0.3, 0.45]})) == pytest.approx(0.05)


class TestIntervals:
    QUERIES, EACH = 30, 8

    def drawn(self, rng):
        """Return values of queries that err together: an error of the query, and one of its own."""
        of_query = rng.normal(size=self.QUERIES)
        return of_query[:, None] + 0.3 * rng.normal(size=(self.QUERIES, self.EACH))

    def held(self, groups, times):
        intervals = [mean(groups(self.drawn(np.random.default_rng(n)))) for n in range(times)]
        return np.mean([interval.low <= 0 <= interval.high for interval in intervals])

    def test_they_hold_the_true_mean_as_often_as_they_say(self):
        """A bootstrap over values instead of queries, the planted defect, promises too much."""
        assert 0.89 <= self.held(list, 300) <= 0.97
        assert self.held(lambda values: list(values.reshape(-1, 1)), 60) < 0.7

    def test_a_median_of_repeats_and_a_ratio_of_two(self):
        rng = np.random.default_rng(1)
        measured = [median(100 + rng.normal(size=9)) for _ in range(200)]
        assert 0.85 <= np.mean([one.low <= 100 <= one.high for one in measured]) <= 1
        values = np.array([100.0, 104.0, 97.0, 101.0, 99.0, 103.0])
        assert ratio(2 * values, values).value == pytest.approx(2)
        assert ratio(2 * values, values).low < 2 < ratio(2 * values, values).high

    def test_too_few_queries_and_errors_without_a_size_have_none(self):
        few = mean([np.array([n]) for n in np.arange(FEWEST - 1.0)])
        assert f"{few:.2g}" == "1.5"
        assert math.isnan(mean([np.array([np.nan]), *[np.ones(1)] * 5]).low)
        assert f"{mean([]):.2g}" == f"{median(np.empty(0)):.2g}" == "-"
        assert f"{Interval(1.0, 0.5, 2.0):.2g}" == "1 (0.5 to 2)"
