"""Compares two sets of scores of one workload: log-probabilities, order of items, label mass."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpuscore.measure.intervals import Interval, mean
from gpuscore.measure.results import Errors, Measured, errors
from gpuscore.measure.workload import Case, query_numbers
from gpuscore.types.batch import BoolArray, Float64Array

RANKED = 10  # least number of items in a ranking


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far scores are from reference scores.

    Attributes:
        reference, got: the scores, and the servers or backends that they came from.
        log_p: differences of log-probabilities.
        mean: their mean size, with an interval by bootstrap over queries.
        p: largest difference of a probability or label mass.
        tau: smallest Kendall's tau-b of the rankings; None: there are no rankings.
        inversions: pairs with a clear gap whose order differs.
        clear_pairs: all pairs with a clear gap.
        mass: largest difference in `got` between a label mass and the sum of the labels'
            probabilities; None: `got` has no label masses.
    """

    reference: Measured
    got: Measured
    log_p: Errors
    mean: Interval
    p: float
    tau: float | None
    inversions: int
    clear_pairs: int
    mass: float | None


def agree(reference: Measured, got: Measured, gap: float) -> Agreement:
    """Compare scores of the workload of `got`.

    A pair of items is clear if its scores in `reference` differ by more than `gap`.
    """
    pairs = list(rankings(reference, got))
    counts = [inversions(right, other, gap) for right, other in pairs]
    taus = [kendall_tau_b(right, other) for right, other in pairs]
    return Agreement(
        reference,
        got,
        log_p=errors(log_p_differences(reference, got)),
        mean=mean(_sizes_by_query(reference, got)),
        p=_largest_of_p(reference, got),
        tau=float(np.min(taus)) if taus else None,  # NaN if all scores of a ranking are equal
        inversions=sum(inverted for inverted, _ in counts),
        clear_pairs=sum(clear for _, clear in counts),
        mass=mass_error(got),
    )


def _cases(scored: Measured) -> tuple[Case, ...]:
    return () if scored.workload is None else scored.workload.cases


def log_p_differences(reference: Measured, got: Measured) -> Float64Array:
    """Return the differences of all log-probabilities."""
    return np.concatenate([_of_case(case, reference, got) for case in _cases(got)])


def _of_case(case: Case, reference: Measured, got: Measured) -> Float64Array:
    difference = got.results[case.name].values - reference.results[case.name].values
    values: Float64Array = difference[_label_mask(case)]
    return values


def _label_mask(case: Case) -> BoolArray:
    """Return where the case has a label: [items, labels]."""
    width = max(map(len, case.label_ids))
    return np.array([np.arange(width) < len(ids) for ids in case.label_ids])


def _sizes_by_query(reference: Measured, got: Measured) -> list[Float64Array]:
    numbers = query_numbers(_cases(got))
    groups = defaultdict(list)
    for case in _cases(got):
        groups[numbers[case.name]].append(np.abs(_of_case(case, reference, got)))
    return [np.concatenate(parts) for parts in groups.values()]


def _largest_of_p(reference: Measured, got: Measured) -> float:
    parts = []
    for case in _cases(got):
        right = reference.results[case.name]
        other = got.results[case.name]
        parts.append((np.exp(other.values) - np.exp(right.values))[_label_mask(case)])
        if right.mass is not None and other.mass is not None:
            parts.append(other.mass - right.mass)
    return errors(np.concatenate(parts)).maximum


def mass_error(scored: Measured) -> float | None:
    """Return the largest difference between a label mass and its labels' sum; None without one."""
    parts = []
    for case in _cases(scored):
        result = scored.results[case.name]
        if result.mass is not None:
            sums = [
                np.exp(row[np.unique(ids, return_index=True)[1]]).sum()
                for row, ids in zip(result.values, case.label_ids, strict=True)
            ]
            parts.append(result.mass - np.minimum(sums, 1.0))
    return errors(np.concatenate(parts)).maximum if parts else None


def rankings(reference: Measured, got: Measured) -> Iterator[tuple[Float64Array, Float64Array]]:
    """Yield two arrays for each label of each case: the items' scores in `reference` and `got`.

    Items with the same prompt are taken once.
    """
    for case in _cases(got):
        first = {tuple(ids): row for row, ids in reversed(list(enumerate(case.prompt_ids())))}
        rows = sorted(first.values())
        if case.same_labels and len(rows) >= RANKED:
            right, other = (one.results[case.name].values[rows].T for one in (reference, got))
            yield from zip(right, other, strict=True)


def kendall_tau_b(a: Float64Array, b: Float64Array) -> float:
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
