"""Promise: the numbers of the table follow their definitions, written out pair by pair."""

import itertools
import math

import numpy as np
import pytest

from gpuscore.measure.parity.metrics import (
    RankedScores,
    errors,
    inversions,
    kendall_tau_b,
    log_odds,
    rank,
    top_overlap,
)


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
    clear = [(w, g) for w, g in zip(pairs(expected, expected), pairs(got, got), strict=True)]
    inverted_pairs = [
        (w1 - w2) * (g1 - g2) < 0
        for (((w1, _), (w2, _)), ((g1, _), (g2, _))) in clear
        if abs(w1 - w2) > gap
    ]
    return sum(inverted_pairs), len(inverted_pairs)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("values", [3, 6, 1000])  # few distinct values give many ties
def test_against_pairs(seed, values):
    rng = np.random.default_rng(seed)
    a, noise = rng.integers(0, values, 41), rng.integers(-2, 3, 41)
    a, b = a.astype(float), (a + noise).astype(float)
    assert kendall_tau_b(a, b) == pytest.approx(tau_b(a, b), abs=1e-12)
    for gap in (0.0, 1.0, 2.5):
        assert inversions(a, b, gap) == inverted(a, b, gap)


def test_tau_at_its_ends():
    a = np.arange(7.0)
    assert kendall_tau_b(a, a) == 1
    assert kendall_tau_b(a, -a) == -1
    assert math.isnan(kendall_tau_b(a, np.ones(7)))


def test_log_odds():
    p = np.array([0.5, 0.9, 1e-9, 1 - 1e-9])
    np.testing.assert_allclose(log_odds(np.log(p)), np.log(p / (1 - p)), rtol=1e-6)
    assert 30 < log_odds(np.zeros(1))[0] < 40, "a probability of 1 has finite odds"


def test_errors():
    measured = errors(np.array([[3.0, -1.0], [0.5, 0.0]]))
    assert (measured.maximum, measured.mean) == (3.0, 1.125)
    assert (measured.median, measured.p99) == (1.0, 3.0)
    assert errors(np.array([])).maximum == 0


def test_nan_and_infinity_are_no_small_errors():
    """A gate that asks whether NaN is over its limit would accept it."""
    for wrong in (np.nan, np.inf, -np.inf):
        assert errors(np.array([0.0] * 5 + [wrong])).maximum == np.inf
    assert errors(np.array([0.0, np.nan])).p99 == np.inf


def test_top_overlap_takes_a_tie_for_no_miss():
    expected = np.array([5.0, 4, 3, 2, 2, 1, 0])
    assert top_overlap(expected, expected + [0, 0, 0, -0.5, 0, 0, 0], top=4) == 1
    assert top_overlap(expected, expected + [0, 0, -2.5, 0, 0, 0, 0], top=3) == pytest.approx(2 / 3)
    assert top_overlap(expected, -expected, top=3) == 0
    assert top_overlap(expected[:2], -expected[:2]) == 1, "fewer items than that: all are the best"


def test_rankings_are_summed_up_by_the_worst_one():
    spread = np.arange(51.0)
    good, bad = (RankedScores("a", spread, got) for got in (spread, -spread))
    agreement = rank([good, bad], gap=1.5)
    assert (agreement.tau, agreement.top) == (-1.0, 0.0)
    assert (agreement.inversions, agreement.clear_pairs) == (50 * 49 / 2, 50 * 49)
    few = rank([RankedScores("a", spread[:19], spread[:19])], gap=1.0)
    assert (few.tau, few.top) == (1.0, None)
    assert rank([], gap=1.0).tau is None


def test_a_constant_ranking_is_no_perfect_one():
    spread = np.arange(30.0)
    assert math.isnan(rank([RankedScores("a", spread, 0 * spread)], gap=1.0).tau)
