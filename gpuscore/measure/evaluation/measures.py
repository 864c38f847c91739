"""Measures per query, by ir_measures, with intervals and paired tests, by SciPy, and a verdict on
runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from scipy import stats

from gpuscore.errors import ConfigError
from gpuscore.measure.evaluation.data import Labelled, Query, Ranked
from gpuscore.measure.evaluation.targets import ScoredRun
from gpuscore.measure.intervals import Interval
from gpuscore.types.batch import Float64Array

RESAMPLES = 9999
AUC_RESAMPLES = 999  # it is no mean, so each resample is computed by itself
_NUMBERS_AT_ONCE = 4_000_000  # of all resamples that are in memory
AUC, ACCURACY, FIRST_STAGE = "AUC", "accuracy", "first stage"
SIGNIFICANT = 0.05
DEFAULT = "nDCG@10 MRR@10 MAP recall@10 AUC"
# Common names of ir_measures' measures.
_ALIASES = ((r"^MRR", "RR"), (r"^MAP", "AP"), (r"^recall", "R"), (r"^precision", "P"))


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference: the evaluated run less another one, query by query.

    Attributes:
        mean: with a 95 % interval.
        p: of a two-sided permutation test, in which each query's difference changes its sign.
        better, worse: numbers of queries; the others are equal.
    """

    mean: Interval
    p: float
    better: int
    worse: int


def parse(text: str) -> dict[str, Any]:
    """Return ir_measures' measures by the names that were given; None stands for AUC.

    Raises:
        ConfigError: a name is not known, or the same one is there twice.
    """
    import ir_measures

    parsed: dict[str, Any] = {}
    for name in text.split():
        own = name
        for pattern, other in _ALIASES:
            own = re.sub(pattern, other, own)
        if name in parsed:
            raise ConfigError(f"--measures names {name} twice")
        try:
            parsed[name] = None if name == AUC else ir_measures.parse_measure(own)
        except (NameError, ValueError, SyntaxError):
            raise ConfigError(
                f"--measures: there is no measure {name}; examples: {DEFAULT} precision@5"
            ) from None
    if not parsed:
        raise ConfigError("--measures is empty")
    return parsed


def by_query(
    measures: Mapping[str, Any],
    queries: Sequence[Query],
    scores: Mapping[str, Sequence[float | None]],
) -> dict[str, Float64Array]:
    """Return each measure's values [queries]; NaN where a query has none, which AUC may.

    Args:
        measures: as `parse` returns them.
        queries: the queries.
        scores: by query id, one per candidate; None for one that was not scored, which ranks last.
    """
    import ir_measures

    ranks = {query.id: _ranks(query, scores[query.id]) for query in queries}
    qrels = {query.id: dict(query.grades) for query in queries}
    run = {
        query.id: dict(zip(query.documents, ranks[query.id].tolist(), strict=True))
        for query in queries
    }
    place = {query.id: index for index, query in enumerate(queries)}
    values = {name: np.zeros(len(queries)) for name in measures}
    wanted = {measure: name for name, measure in measures.items() if measure is not None}
    for metric in ir_measures.iter_calc(list(wanted), qrels, run) if wanted else ():
        values[wanted[metric.measure]][place[metric.query_id]] = metric.value
    if AUC in measures:
        rows = [(query, scores[query.id]) for query in queries]
        values[AUC] = np.array([_auc_of(query, row) for query, row in rows])
    return values


def _ranks(query: Query, scores: Sequence[float | None]) -> Float64Array:
    """Return numbers that put the candidates in the order of their scores, without ties.

    Measures of a tie would depend on the order of the candidates, in which the relevant ones often
    come first: a model that gives everything the same score would look perfect. A digest of the ids
    decides instead. Small integers, because trec_eval compares scores in single precision.
    """
    values = _numbers(scores)
    ties = [sha256(f"{query.id}\0{id}".encode()).digest() for id in query.documents]
    order = sorted(range(len(values)), key=lambda i: (values[i], ties[i]))
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    return ranks


def _numbers(scores: Sequence[float | None]) -> Float64Array:
    return np.array([-np.inf if score is None else score for score in scores], np.float64)


def _auc_of(query: Query, scores: Sequence[float | None]) -> float:
    relevant = np.array([query.grades.get(id, 0) > 0 for id in query.documents])
    return auc(_numbers(scores), relevant)


def auc(scores: Float64Array, positive: Any) -> float:
    """Return the share of pairs that are in the right order, ties as a half; NaN without pairs."""
    good, bad = int(positive.sum()), int((~positive).sum())
    if not good or not bad:
        return float("nan")
    ranks = stats.rankdata(scores)
    return float((ranks[positive].sum() - good * (good + 1) / 2) / (good * bad))


def interval(values: Float64Array, seed: int) -> Interval:
    """Return the mean over queries and its bootstrap interval (percentiles)."""
    values = values[~np.isnan(values)]
    mean = float(values.mean()) if values.size else float("nan")
    if values.size < 2:
        return Interval(mean)
    drawn = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=_batch(values.size),
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(mean, float(drawn.low), float(drawn.high))


def difference(ours: Float64Array, theirs: Float64Array, seed: int) -> Difference:
    """Compare two runs query by query; queries without a value in both are left out."""
    both = ~(np.isnan(ours) | np.isnan(theirs))
    ours, theirs = ours[both], theirs[both]
    change = ours - theirs
    p = 1.0
    if change.size > 1 and change.any():
        p = stats.permutation_test(
            (ours, theirs),
            _mean_difference,
            permutation_type="samples",
            n_resamples=RESAMPLES,
            batch=_batch(change.size),
            rng=np.random.default_rng(seed),
        ).pvalue
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    return Difference(interval(change, seed), float(p), better, worse)


def _mean_difference(a: Any, b: Any, axis: int) -> Any:
    return np.mean(a - b, axis=axis)


def _batch(size: int) -> int:
    return max(1, _NUMBERS_AT_ONCE // max(1, size))


def classified(classes: Sequence[str], rows: Float64Array, labels: Sequence[str]) -> Float64Array:
    """Return [texts], 1 where the most probable class is right and 0 elsewhere.

    Args:
        classes: columns of `rows`.
        rows: [texts, classes] probabilities.
        labels: right classes.

    Raises:
        ConfigError: a label is not among the classes.
    """
    if unknown := sorted(set(labels) - set(classes)):
        shown = ", ".join(classes)
        raise ConfigError(f"--data has the label {unknown[0]!r}, the classes are {shown}")
    best = np.array([classes[i] for i in rows.argmax(axis=1)])
    right: Float64Array = (best == np.array(labels)).astype(np.float64)
    return right


def auc_interval(
    classes: Sequence[str], rows: Float64Array, labels: Sequence[str], seed: int
) -> Interval:
    """Return the AUC of each class against the rest, averaged over classes with both kinds."""
    right = np.array(labels)

    def macro(chosen: Any) -> float:
        aucs = [auc(rows[chosen, i], right[chosen] == name) for i, name in enumerate(classes)]
        known = [value for value in aucs if not np.isnan(value)]
        return float(np.mean(known)) if known else float("nan")

    everything = np.arange(len(right))
    mean = macro(everything)
    if len(right) < 2 or np.isnan(mean):
        return Interval(mean)
    drawn = np.random.default_rng(seed).integers(0, len(right), (AUC_RESAMPLES, len(right)))
    return Interval.of(mean, np.array([macro(chosen) for chosen in drawn]))


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's measures.

    Attributes:
        name: of the run.
        values: by measure, one per query or text.
        means: with intervals; of measures without values, too.
        not_scored: documents without a score, which rank last.
        scored: the run; None for a first stage, which was not computed here.
        pairs: documents or texts of the run.
    """

    name: str
    values: Mapping[str, Float64Array]
    means: Mapping[str, Interval]
    not_scored: int
    scored: ScoredRun | None
    pairs: int


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """The evaluated run against another one, by measure."""

    ours: Measured
    theirs: Measured
    differences: Mapping[str, Difference]


def measured(
    data: Ranked | Labelled, run: ScoredRun, measures: Mapping[str, Any], seed: int
) -> Measured:
    """Return a run's measures; raise ConfigError for a label that is not among the classes."""
    if isinstance(data, Labelled):
        return _classification(data, run, seed)
    scores = {query.id: run.answers[query.id].scores for query in data.queries}
    lost = sum(score is None for row in scores.values() for score in row)
    return _ranking(data, run.name, scores, measures, seed, lost, run)


def first_stage(data: Ranked, measures: Mapping[str, Any], seed: int) -> Measured | None:
    """Return the measures of the candidates' own order, if all queries have one."""
    scores = {query.id: query.first_stage for query in data.queries}
    known = {id: row for id, row in scores.items() if row is not None}
    if len(known) < len(scores):
        return None
    return _ranking(data, FIRST_STAGE, known, measures, seed, 0, None)


def _ranking(
    data: Ranked,
    name: str,
    scores: Mapping[str, Sequence[float | None]],
    measures: Mapping[str, Any],
    seed: int,
    lost: int,
    run: ScoredRun | None,
) -> Measured:
    values = by_query(measures, data.queries, scores)
    means = {measure: interval(rows, seed) for measure, rows in values.items()}
    return Measured(name, values, means, lost, run, data.pairs)


def _classification(data: Labelled, run: ScoredRun, seed: int) -> Measured:
    answers = [run.answers[unit.id] for unit in data.units]
    classes = answers[0].classes
    if any(answer.classes != classes for answer in answers):
        raise ConfigError(f"{run.name} answered with different classes")
    rows = np.array([row for answer in answers for row in answer.scores], np.float64)
    right = classified(classes, rows, data.labels)
    means = {
        ACCURACY: interval(right, seed),
        AUC: auc_interval(classes, rows, data.labels, seed),
    }
    return Measured(run.name, {ACCURACY: right}, means, 0, run, len(rows))


def compared(ours: Measured, theirs: Measured, seed: int) -> ComparedRuns:
    differences = {
        name: difference(values, theirs.values[name], seed) for name, values in ours.values.items()
    }
    return ComparedRuns(ours, theirs, differences)


def verdict(runs: ComparedRuns, measure: str, margin: float | None) -> str:
    """Return a sentence about one measure."""
    change = runs.differences[measure]
    mean = change.mean
    word = "no difference shown"
    if change.p <= SIGNIFICANT:
        word = "better" if mean.value > 0 else "worse"
    said = (
        f"{measure}: {runs.ours.name} {runs.ours.means[measure].value:.4f}, {runs.theirs.name} "
        f"{runs.theirs.means[measure].value:.4f}: {word} ({mean.value:+.4f}, 95 % "
        f"{mean.low:+.4f} to {mean.high:+.4f}, p {change.p:.4f})"
    )
    if margin is None:
        return said
    holds = "not worse" if holds_margin(change, margin) else "NOT shown to be not worse"
    return f"{said}; {holds} by more than {margin:g}"


def holds_margin(change: Difference, margin: float) -> bool:
    """Return True if a loss of more than the margin is outside of the interval."""
    return change.mean.low > -margin  # not so for NaN
