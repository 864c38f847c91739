"""Promise: rankings disturbed by no more than the permitted noise pass at a known rate, and those
that are disturbed more fail."""

import numpy as np
import pytest

from gpuscore.measure.parity.metrics import RankedScores, kendall_tau_b, top_overlap
from gpuscore.measure.parity.noise import (
    DRAWS,
    PermittedNoise,
    TauB,
    TopOverlap,
    worst_ranking,
)
from support.slow import slow

MEASURES = [TauB(), TopOverlap()]
TRIALS = 200
NOISE = PermittedNoise.normal(0.1)
# Of binomially distributed failures at RATE of TRIALS, fewer than one time in 10,000 are more.
MOST_FAILURES = 9


def scores(rng, count, lengths=(12, 17, 40, 120)):
    """Return `count` rankings of several lengths, as a workload has."""
    return [rng.normal(size=lengths[place % len(lengths)]) for place in range(count)]


def failures(measure, change, trials=TRIALS, count=8):
    """Count the trials that fail, of scores to which `change(rng, expected)` is added."""
    rng = np.random.default_rng(1)
    failed = 0
    for _ in range(trials):
        ranked = [
            RankedScores("a", expected, expected + change(rng, expected))
            for expected in scores(rng, count)
        ]
        failed += not worst_ranking(ranked, NOISE, measure).within
    return failed


def permitted(factor=1.0):
    return lambda rng, expected: factor * 0.1 / 2.5758 * rng.normal(size=len(expected))


class TestRates:
    """The limits are computed with a fixed seed; these trials draw noise and scores anew."""

    @pytest.fixture(autouse=True)
    def _fewer_draws(self, monkeypatch):
        """Keep 99 of 999 draws, whose largest is exceeded at the same rate."""
        monkeypatch.setattr("gpuscore.measure.parity.noise.DRAWS", 99)
        monkeypatch.setattr("gpuscore.measure.parity.noise._PLACE", 98)

    @pytest.mark.parametrize("measure", [TauB(), *slow(TopOverlap())])
    def test_permitted_noise_fails_as_seldom_as_said(self, measure):
        assert failures(measure, permitted()) <= MOST_FAILURES

    @pytest.mark.slow
    def test_permitted_noise_fails_at_that_rate_and_not_never(self):
        """A limit so low that nothing fails would pass the test above."""
        assert 5 <= failures(TauB(), permitted(), trials=1500) <= 33

    @pytest.mark.parametrize(("measure", "factor"), [(TauB(), 2), (TopOverlap(), 6)])
    def test_more_noise_fails(self, measure, factor):
        assert failures(measure, permitted(factor), trials=50) >= 40

    def test_a_wrong_order_of_near_scores_fails(self):
        """Groups of scores within twice the permitted p99 turn round: a defect of the order only,
        which swaps no pair with a clear gap."""

        def turned(rng, expected):
            order, got, start = np.argsort(expected), expected.copy(), 0
            for end in range(1, len(expected) + 1):
                if end == len(expected) or expected[order[end]] - expected[order[start]] > 0.2:
                    got[order[start:end]] = expected[order[start:end]][::-1]
                    start = end
            return got - expected

        assert failures(TauB(), turned, trials=50) >= 45


def test_the_rate_is_the_share_of_the_draws():
    rng = np.random.default_rng(3)
    expected = rng.normal(size=60)
    noise = NOISE.draw(np.random.RandomState(5), 60)
    agreed = [
        worst_ranking(
            [RankedScores("a", expected, expected + noise[:, draw])], NOISE, TauB()
        ).within
        for draw in range(300)
    ]
    assert 0.96 <= np.mean(agreed) < 1
    assert DRAWS == 999


@pytest.mark.parametrize("ties", [0, 9])
def test_draws_are_measured_as_runs_are(ties):
    rng = np.random.default_rng(2)
    expected = rng.normal(size=31)
    expected[:ties] = expected[0]
    noise = 0.3 * rng.normal(size=(31, 7))
    want_top = [top_overlap(expected, expected + column) for column in noise.T]
    want_tau = [kendall_tau_b(expected, expected + column) for column in noise.T]
    np.testing.assert_allclose(TauB().drawn(expected, noise), want_tau, rtol=1e-12)
    np.testing.assert_allclose(TopOverlap().drawn(expected, noise), want_top, rtol=1e-12)


def test_noise_has_the_sizes_that_a_gate_permits():
    def p99(noise):
        return np.percentile(np.abs(noise.draw(np.random.RandomState(0), 200)), 99)

    assert p99(PermittedNoise.normal(0.05)) == pytest.approx(0.05, rel=0.02)
    assert PermittedNoise.normal(0.05, 0.04).sizes.max() == 0.04
    assert PermittedNoise.up_to(1e-4).sizes.max() == 1e-4
    measured = np.array([0.1, -0.2, np.nan])
    twice = PermittedNoise.multiple(2.0, measured, 0.2)
    np.testing.assert_allclose(twice.sizes, [0.2, 0.4])
    assert twice.clear == 0.4
    assert abs(NOISE.draw(np.random.RandomState(0), 300).mean()) < 1e-3, "of either sign"


class TestWorst:
    """The ranking that is named, and those that cannot tell."""

    def test_each_ranking_has_a_limit_of_its_own(self):
        near, far = np.linspace(0, 0.2, 30), np.linspace(0, 200, 30)
        swapped = far.copy()
        swapped[[3, 9]] = far[[9, 3]]
        disturbed = near + NOISE.draw(np.random.RandomState(7), 30)[:, 0]
        worst = worst_ranking(
            [RankedScores("near", near, disturbed), RankedScores("far", far, swapped)],
            NOISE,
            TauB(),
        )
        assert worst.name == "far"
        assert not worst.within
        assert kendall_tau_b(near, disturbed) < worst.measured, (
            "the worst by its limit, not by tau-b"
        )

    @pytest.mark.parametrize("measure", MEASURES)
    def test_nothing_to_judge(self, measure):
        assert worst_ranking([], NOISE, measure) is None
        flat = np.zeros(30)
        assert worst_ranking([RankedScores("flat", flat, flat)], NOISE, measure) is None

    def test_a_ranking_within_the_noise_cannot_tell(self):
        expected = np.linspace(0, 0.01, 30)
        got = np.random.default_rng(0).permutation(expected)
        worst = worst_ranking([RankedScores("near", expected, got)], NOISE, TauB())
        assert worst.within
        assert worst.telling == 0

    @pytest.mark.parametrize("measure", MEASURES)
    @pytest.mark.parametrize("bad", [np.zeros(30), np.full(30, np.nan)])
    def test_constant_and_missing_scores_agree_with_nothing(self, measure, bad):
        good = np.arange(30.0)
        ranked = [RankedScores("good", good, good), RankedScores("bad", good, bad)]
        worst = worst_ranking(ranked, NOISE, measure)
        assert (worst.name, worst.within) == ("bad", False)
