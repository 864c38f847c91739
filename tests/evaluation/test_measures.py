"""Promise: measures follow their definitions, a tie helps nobody, a paired test is exact."""

from itertools import product

import numpy as np
import pytest

from gpuscore.errors import ConfigError
from gpuscore.measure.evaluation.data import Query
from gpuscore.measure.evaluation.measures import (
    DEFAULT,
    auc,
    auc_interval,
    by_query,
    classified,
    difference,
    holds_margin,
    interval,
    parse,
)


def query(grades, id="q", judged=None):
    documents = tuple(f"d{i}" for i in range(len(grades)))
    known = dict(zip(documents, grades, strict=True)) | (judged or {})
    return Query(id, "text", documents, documents, None, known)


def value_of(name, grades, scores, judged=None):
    return by_query(parse(name), [query(grades, judged=judged)], {"q": scores})[name][0]


def test_by_hand():
    """Grades 0, 2, 1 in the order 1, 0, 2."""
    grades, scores = [0, 2, 1], [0.5, 0.1, 0.9]
    gain = 1 / np.log2(2) + 2 / np.log2(4)
    best = 2 / np.log2(2) + 1 / np.log2(3)
    assert value_of("nDCG@10", grades, scores) == pytest.approx(gain / best)
    assert value_of("nDCG@1", grades, scores) == pytest.approx(1 / 2)
    assert value_of("MRR@10", [0, 1, 0], [0.9, 0.5, 0.7]) == pytest.approx(1 / 3)
    assert value_of("MAP", grades, scores) == pytest.approx((1 + 2 / 3) / 2)
    assert value_of("precision@2", grades, scores) == pytest.approx(1 / 2)


def test_recall_counts_what_is_no_candidate():
    assert value_of("recall@10", [1, 0], [0.9, 0.1], judged={"missed": 1}) == pytest.approx(1 / 2)


def test_scores_that_single_precision_cannot_tell_apart():
    close = [0.99999999, 0.999999991]
    assert np.float32(close[0]) == np.float32(close[1])
    assert value_of("nDCG@10", [0, 1], close) == 1
    assert value_of("nDCG@10", [1, 0], close) < 1


def test_equal_scores_are_no_perfect_ranking():
    """The relevant documents stand first, as files of data often have them."""
    queries = [query([1] + [0] * 9, f"q{i}") for i in range(300)]
    values = by_query(parse("MRR@10 AUC"), queries, {check.id: [0.5] * 10 for check in queries})
    chance = np.mean(1 / np.arange(1, 11))
    assert values["MRR@10"].mean() == pytest.approx(chance, abs=0.06)
    assert (values["AUC"] == 0.5).all()


def test_a_document_without_a_score_ranks_last():
    assert value_of("MRR@10", [1, 0, 0], [None, 0.1, 1e-300]) == pytest.approx(1 / 3)


def test_auc_counts_pairs():
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 7, 63).astype(float)
    positive = rng.random(63) < 0.3
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc(scores, np.ones(63, bool)))


def test_a_paired_test_is_the_one_of_all_signs():
    rng = np.random.default_rng(5)
    ours, theirs = rng.random(9), rng.random(9)
    change = ours - theirs
    every = [np.mean(change * signs) for signs in product((-1, 1), repeat=9)]
    expected = min(1, 2 * min(np.mean(every >= change.mean()), np.mean(every <= change.mean())))
    compared = difference(ours, theirs, 0)
    assert compared.p == pytest.approx(expected)
    assert compared.mean.value == pytest.approx(change.mean())
    assert (compared.better, compared.worse) == ((change > 0).sum(), (change < 0).sum())


def test_what_is_equal_has_no_difference():
    values = np.array([0.1, 0.5, np.nan, 1.0])
    change = difference(values, values.copy(), 0)
    assert (change.p, change.mean.low, change.mean.high, change.better) == (1.0, 0.0, 0.0, 0)


def test_queries_without_a_value_are_left_out():
    ours, theirs = np.array([1.0, np.nan, 0.5, 0.4]), np.array([0.0, 1.0, np.nan, 0.1])
    change = difference(ours, theirs, 0)
    assert change.mean.value == pytest.approx(0.65)
    assert interval(ours, 0).value == pytest.approx(np.nanmean(ours))


def test_an_interval_is_that_of_the_mean():
    """The bootstrap of many values gives the normal distribution's interval."""
    values = np.random.default_rng(1).normal(0.5, 0.2, 1111)
    mean = interval(values, 0)
    half = 1.96 * values.std() / np.sqrt(values.size)
    assert mean.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert mean.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert interval(values, 0) == mean
    assert np.isnan(interval(values[:1], 0).low)


def test_a_margin():
    worse = difference(np.full(63, 0.5), np.full(63, 0.505), 0)
    assert holds_margin(worse, 0.01)
    assert not holds_margin(worse, 0.001)
    assert not holds_margin(difference(np.array([1.0]), np.array([0.0]), 0), 0.01)


def test_classes():
    classes = ("a", "b", "c")
    rows = np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.4, 0.5, 0.1], [0.2, 0.2, 0.6]])
    labels = ["a", "b", "a", "c"]
    assert classified(classes, rows, labels).tolist() == [1, 1, 0, 1]
    area = auc_interval(classes, rows, labels, 0)
    assert area.value == pytest.approx(np.mean([1, 1, 1]))
    assert 0 <= area.low <= area.value <= area.high <= 1
    with pytest.raises(ConfigError, match="the label 'd', the classes are a, b, c"):
        classified(classes, rows, ["a", "b", "a", "d"])


def test_names_of_measures():
    assert list(parse(DEFAULT)) == DEFAULT.split()
    for text, message in (
        ("nDCG@10 nDCG@10", "twice"),
        ("foo@3", "no measure foo@3"),
        (" ", "empt"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(text)
