"""Promise: a fitted temperature, with biases or without, has the least negative log-likelihood;
measures are by rows that a scaling was not fitted on, with intervals over rows."""

import numpy as np
import pytest
from scipy.optimize import minimize

from gpuscore.measure.calibrate.fit import COLDEST, HOTTEST, PRIOR, fit, fold_of, out_of_fold
from gpuscore.measure.calibrate.metrics import BINS, bins, measures
from gpuscore.measure.calibrate.samples import Judged, Samples
from gpuscore.prompts.calibration import Scaling


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def samples_of(*columns):
    return Samples.of(zip(*columns, strict=True))


def drawn(rng, count=2000, labels=4, temperature=2.5, bias=(0.0, 0.0, 0.0, 0.0), ragged=True):
    """Draw log-probabilities, and right answers with the odds that temperature and bias give."""
    rows, right = [], []
    for _ in range(count):
        size = int(rng.integers(2, labels + 1)) if ragged else labels
        row = rng.normal(0, 3, size)
        row -= np.log(np.exp(row).sum()) + rng.uniform(0, 5)  # the labels' mass differs
        shares = Scaling(temperature, tuple(bias)).shares(row[None])[0]
        rows.append(row)
        right.append(int(rng.choice(size, p=shares)))
    numbers = list(range(count))
    return samples_of(rows, right, numbers, numbers, [False] * count)


def loss(samples, inverse, bias):
    scores = np.where(np.isfinite(samples.logprobs), samples.logprobs * inverse + bias, -np.inf)
    top = scores.max(axis=1, keepdims=True)
    logs = scores - top - np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
    right = logs[np.arange(len(samples)), samples.right].sum()
    return -right + PRIOR / 2 * (bias**2).sum()


def test_the_temperature_that_made_the_answers_is_found(rng):
    fitted = fit(drawn(rng, temperature=2.5), with_bias=False)
    assert fitted.temperature == pytest.approx(2.5, rel=0.1)
    assert fitted.bias == ()
    fitted = fit(drawn(rng, temperature=0.4, ragged=False), with_bias=False)
    assert fitted.temperature == pytest.approx(0.4, rel=0.15)


def test_biases_that_made_the_answers_are_found(rng):
    bias = np.array([1.5, 0.0, -0.5, -1.0])
    fitted = fit(drawn(rng, 6000, bias=bias), with_bias=True)
    assert fitted.temperature == pytest.approx(2.5, rel=0.1)
    got = np.array(fitted.bias)
    np.testing.assert_allclose(got - got.mean(), bias - bias.mean(), atol=0.15)


@pytest.mark.parametrize("with_bias", [False, True])
def test_scipy_finds_no_lower_loss(rng, with_bias):
    samples = drawn(rng, 300, temperature=1.7, bias=(0.8, -0.2, 0.0, -0.6))
    fitted = fit(samples, with_bias)
    width = samples.logprobs.shape[1] if with_bias else 0

    def value(x):
        return loss(samples, x[0], x[1:] if with_bias else np.zeros(samples.logprobs.shape[1]))

    best = minimize(value, [1.0, *[0.0] * width], method="Nelder-Mead" if not width else "BFGS")
    ours = value(np.array([1 / fitted.temperature, *fitted.bias]))
    assert ours == pytest.approx(best.fun, abs=1e-4)
    assert fitted.temperature == pytest.approx(1 / best.x[0], rel=1e-3)


def test_where_all_is_right_the_temperature_stays_in_its_range():
    rows = [np.array([-0.1, -3.0])] * 50
    numbers = list(range(50))
    samples = samples_of(rows, [0] * 50, numbers, numbers, [False] * 50)
    assert COLDEST <= fit(samples, with_bias=False).temperature < 0.1
    samples = samples_of(rows, [1] * 50, numbers, numbers, [False] * 50)
    assert fit(samples, with_bias=False).temperature == pytest.approx(HOTTEST)
    bias = fit(samples, with_bias=True).bias
    assert bias[1] > bias[0]
    assert np.isfinite(bias).all()


def test_answers_are_judged_without_their_row(rng):
    samples = drawn(rng, 200)
    fold = fold_of(samples.rows, 5, seed=3)
    assert np.bincount(fold).tolist() == [40] * 5
    judged = out_of_fold(samples, False, 5, seed=3)
    for number in range(5):
        scaling = fit(samples.part(fold != number), False)
        held = fold == number
        np.testing.assert_allclose(judged.shares[held], samples.part(held).shares(scaling))
    # The questions of a row are in one fold.
    assert len(set(fold_of(np.array([7, 7, 7, 1, 2, 9]), 3, 0)[:3].tolist())) == 1


def test_two_orders_are_one_answer():
    shares = np.log([0.7, 0.2, 0.1])
    turned = np.log([0.3, 0.3, 0.4])  # of the options in reverse order
    samples = samples_of([shares, turned], [0, 0], [5, 5], [1, 1], [False, True])
    assert samples.right.tolist() == [0, 2]
    assert samples.num_questions == 1
    judged = Judged.of(samples, samples.shares(Scaling()))
    np.testing.assert_allclose(judged.shares, [[0.55, 0.25, 0.2]])
    assert judged.right.tolist() == [0]


def test_measures_are_their_definitions(rng):
    samples = drawn(rng, 300)
    judged = Judged.of(samples, samples.shares(Scaling()))
    measured = measures(judged, seed=0)
    brier = loss_sum = right = 0.0
    inside = [[] for _ in range(BINS)]
    for shares, wanted in zip(judged.shares, judged.right, strict=True):
        best = int(np.argmax(shares))
        brier += sum((share - (place == wanted)) ** 2 for place, share in enumerate(shares))
        loss_sum -= np.log(shares[wanted])
        right += best == wanted
        place = min(int(shares[best] * BINS), BINS - 1)
        inside[place].append((shares[best], best == wanted))
    ece = sum(abs(sum(s for s, _ in judged) - sum(r for _, r in judged)) for judged in inside)
    expected = {"accuracy": right, "ece": ece, "brier": brier, "log_loss": loss_sum}
    for name, value in expected.items():
        assert measured[name].value == pytest.approx(value / 300)
        assert measured[name].low < measured[name].value < measured[name].high
    shown = bins(judged)
    assert [part.count for part in shown] == [len(part) for part in inside if part]
    assert [part.accuracy for part in shown] == [np.mean([r for _, r in o]) for o in inside if o]


def test_intervals_are_over_rows(rng):
    """Ten equal questions of a row say no more than one."""
    samples = drawn(rng, 200)
    many = samples_of(
        [row[np.isfinite(row)] for row in samples.logprobs for _ in range(10)],
        np.repeat(samples.right, 10).tolist(),
        list(range(2000)),
        np.repeat(samples.rows, 10).tolist(),
        [False] * 2000,
    )
    single, ten = (
        measures(Judged.of(judged, judged.shares(Scaling())), seed=1)["brier"]
        for judged in (samples, many)
    )
    assert single.value == pytest.approx(ten.value)
    assert ten.high - ten.low == pytest.approx(single.high - single.low)
