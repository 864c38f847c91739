"""The agreement of two runs of one workload: in log p, in order, and in the mass of the labels."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.measure.intervals import Interval, mean
from gpuscore.measure.results import Errors, Run, errors
from gpuscore.measure.workload import Case, Workload, query_numbers
from gpuscore.types.batch import BoolArray, Float64Array

RANKED = 10  # least number of items in a ranking


@dataclass(frozen=True, slots=True)
class RankedScores:
    """The scores of a set of items by one label, in two runs."""

    name: str
    reference: Float64Array  # [n]
    got: Float64Array  # [n]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of a run with another one that counts as right.

    Attributes:
        reference, got: the runs.
        log_p: differences of log-probabilities.
        mean: of their sizes, with an interval by bootstrap over queries.
        p: differences of probabilities and label masses.
        rankings: of each case's items by each of its labels.
        tau: smallest Kendall's tau-b of the rankings; None: there is none.
        inversions: pairs with a clear gap whose order differs.
        clear_pairs: all pairs with a clear gap.
        mass: largest difference of a label mass of `got` from the sum of its labels'
            probabilities; None: it has no masses.
    """

    reference: Run
    got: Run
    log_p: Errors
    mean: Interval
    p: Errors
    rankings: tuple[RankedScores, ...]
    tau: float | None
    inversions: int
    clear_pairs: int
    mass: float | None


def agree(workload: Workload, reference: Run, got: Run, gap: float) -> Agreement:
    """Compare two runs; the order of two scores over `gap` apart in `reference` is clear."""
    ranked = rankings(workload, reference, got)
    counts = [inversions(ranking.reference, ranking.got, gap) for ranking in ranked]
    taus = [kendall_tau_b(ranking.reference, ranking.got) for ranking in ranked]
    return Agreement(
        reference,
        got,
        errors(log_p_differences(workload, reference, got)),
        mean(_sizes_by_query(workload, reference, got)),
        errors(_p_differences(workload, reference, got)),
        ranked,
        float(np.min(taus)) if taus else None,  # NaN if one is, which fails every gate
        sum(inverted for inverted, _ in counts),
        sum(clear for _, clear in counts),
        mass_error(workload, got),
    )


def log_p_differences(workload: Workload, reference: Run, got: Run) -> Float64Array:
    """Return the differences of all log-probabilities."""
    return np.concatenate([_of_case(case, reference, got) for case in workload.cases])


def _of_case(case: Case, reference: Run, got: Run) -> Float64Array:
    difference = got.results[case.name].values - reference.results[case.name].values
    values: Float64Array = difference[_asked(case)]
    return values


def _asked(case: Case) -> BoolArray:
    """Return where the case has a label: [items, labels]."""
    width = max(map(len, case.label_ids))
    return np.array([np.arange(width) < len(ids) for ids in case.label_ids])


def _sizes_by_query(workload: Workload, reference: Run, got: Run) -> list[Float64Array]:
    numbers, groups = query_numbers(workload), defaultdict(list)
    for case in workload.cases:
        groups[numbers[case.name]].append(np.abs(_of_case(case, reference, got)))
    return [np.concatenate(parts) for parts in groups.values()]


def _p_differences(workload: Workload, reference: Run, got: Run) -> Float64Array:
    """Return the differences of all probabilities and label masses."""
    parts = []
    for case in workload.cases:
        right, other = reference.results[case.name], got.results[case.name]
        parts.append((np.exp(other.values) - np.exp(right.values))[_asked(case)])
        if right.mass is not None and other.mass is not None:
            parts.append(other.mass - right.mass)
    return np.concatenate(parts)


def mass_error(workload: Workload, run: Run) -> float | None:
    """Return by how much a label mass differs at most from the sum of its labels' probabilities;
    None without masses."""
    parts = []
    for case in workload.cases:
        result = run.results[case.name]
        if result.mass is not None:
            sums = [
                np.exp(row[np.unique(ids, return_index=True)[1]]).sum()
                for row, ids in zip(result.values, case.label_ids, strict=True)
            ]
            parts.append(result.mass - np.minimum(sums, 1.0))
    return errors(np.concatenate(parts)).maximum if parts else None


def rankings(workload: Workload, reference: Run, got: Run) -> tuple[RankedScores, ...]:
    """Return a ranking of each case's items by each of its labels.

    Items with the same prompt are taken once.
    """
    made = []
    for case in workload.cases:
        first = {tuple(ids): row for row, ids in reversed(list(enumerate(case.prompt_ids())))}
        rows = sorted(first.values())
        if case.same_labels and len(rows) >= RANKED:
            right, other = (run.results[case.name].values[rows] for run in (reference, got))
            for label in range(right.shape[1]):
                name = f"{case.name!r} by label {label}"
                made.append(RankedScores(name, right[:, label], other[:, label]))
    return tuple(made)


def kendall_tau_b(a: Sequence[float] | Float64Array, b: Sequence[float] | Float64Array) -> float:
    """Return the rank correlation of two arrays [n] (Kendall 1945); NaN if one is constant.

    (concordant - discordant) / sqrt(pairs not tied in a * pairs not tied in b), over all pairs.
    """
    of_a, of_b = (np.sign(np.subtract.outer(values, values)) for values in (a, b))
    untied = float(np.abs(of_a).sum()) * float(np.abs(of_b).sum())
    return float((of_a * of_b).sum() / np.sqrt(untied)) if untied else float("nan")


def inversions(reference: Float64Array, got: Float64Array, gap: float) -> tuple[int, int]:
    """Count the pairs over `gap` apart in `reference`: first those swapped in `got`, then all."""
    clear = reference[:, None] - reference[None, :] > gap  # [n, n], each pair once
    return int((clear & (got[:, None] < got[None, :])).sum()), int(clear.sum())
