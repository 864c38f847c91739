"""From runs to measures, comparisons and what they say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuscore.errors import ConfigError
from gpuscore.measure.evaluation.data import Labelled, Ranked
from gpuscore.measure.evaluation.measures import (
    ACCURACY,
    AUC,
    Difference,
    auc_interval,
    by_query,
    classified,
    difference,
    interval,
)
from gpuscore.measure.evaluation.runs import ScoredRun
from gpuscore.measure.reports import Interval
from gpuscore.types.arrays import Float64Array

FIRST_STAGE = "first stage"
SIGNIFICANT = 0.05


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

    @property
    def pairs_per_second(self) -> float | None:
        return None if self.scored is None else self.pairs / max(self.scored.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """The evaluated run against another one, by measure."""

    ours: Measured
    theirs: Measured
    differences: Mapping[str, Difference]


def measured(
    data: Ranked | Labelled, run: ScoredRun, measures: Mapping[str, Any], seed: int
) -> Measured:
    """Return a run's measures; raise ConfigError for a label that is none of the classes."""
    if isinstance(data, Labelled):
        return _classification(data, run, seed)
    scores = {query.id: run.answers[query.id].answer.scores for query in data.queries}
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
    answers = [run.answers[unit.id].answer for unit in data.units]
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
    found = {
        name: difference(values, theirs.values[name], seed) for name, values in ours.values.items()
    }
    return ComparedRuns(ours, theirs, found)


def verdict(found: ComparedRuns, measure: str, margin: float | None) -> str:
    """Return a sentence about one measure."""
    one = found.differences[measure]
    mean = one.mean
    word = "no difference shown"
    if one.p <= SIGNIFICANT:
        word = "better" if mean.value > 0 else "worse"
    said = (
        f"{measure}: {found.ours.name} {found.ours.means[measure].value:.4f}, {found.theirs.name} "
        f"{found.theirs.means[measure].value:.4f}: {word} ({signed(mean.value)}, 95 % "
        f"{signed(mean.low)} to {signed(mean.high)}, p {one.p:.4f})"
    )
    if margin is None:
        return said
    holds = "not worse" if holds_margin(one, margin) else "NOT shown to be not worse"
    return f"{said}; {holds} by more than {margin:g}"


def holds_margin(found: Difference, margin: float) -> bool:
    """Return True if a loss of more than the margin is outside of the interval."""
    if np.isnan(found.mean.low):
        return False
    return found.mean.low > -margin


def signed(value: float) -> str:
    return f"{value:+.4f}"
