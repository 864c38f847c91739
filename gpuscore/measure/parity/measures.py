"""Differences of two runs of one workload, score by score and item by item, with their queries."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpuscore.measure.intervals import Interval, Resamples
from gpuscore.measure.parity.metrics import RankedScores, kendall_tau_b
from gpuscore.measure.parity.results import Run
from gpuscore.measure.parity.workload import Case, Workload, query_numbers
from gpuscore.types.batch import BoolArray, Float64Array, Int64Array

RANKED = 10  # least number of items in a ranking


class ByQuery(NamedTuple):
    """Values with the query of each, by its number."""

    values: Float64Array
    queries: Int64Array

    @classmethod
    def join(cls, parts: list[tuple[int, Float64Array]]) -> "ByQuery":
        """Join values of queries."""
        values = [np.ravel(part).astype(np.float64) for _, part in parts]
        numbers = [np.full(np.size(part), number) for number, part in parts]
        if not parts:
            return cls(np.empty(0), np.empty(0, np.int64))
        return cls(np.concatenate(values), np.concatenate(numbers).astype(np.int64))


def asked(case: Case) -> BoolArray:
    """Return where the case has a label: [items, labels]."""
    width = max(map(len, case.label_ids))
    return np.array([np.arange(width) < len(ids) for ids in case.label_ids])


def differences(workload: Workload, reference: Run, got: Run) -> tuple[Float64Array, Float64Array]:
    """Return the differences of all log-probabilities, and of all probabilities and masses."""
    log_p, p = [], []
    for case in workload.cases:
        right, other = reference.results[case.name], got.results[case.name]
        there = asked(case)
        log_p.append((other.values - right.values)[there])
        p.append((np.exp(other.values) - np.exp(right.values))[there])
        if right.mass is not None and other.mass is not None:
            p.append(other.mass - right.mass)
    return np.concatenate(log_p), np.concatenate(p)


def mass_errors(workload: Workload, run: Run) -> Float64Array:
    """Return by how much each label mass differs from the sum of its labels' probabilities."""
    parts = [np.empty(0)]
    for case in workload.cases:
        result = run.results[case.name]
        if result.mass is not None:
            sums = [
                np.exp(row[np.unique(ids, return_index=True)[1]]).sum()
                for row, ids in zip(result.values, case.label_ids, strict=True)
            ]
            parts.append(result.mass - np.minimum(sums, 1.0))
    return np.concatenate(parts)


def rankings(workload: Workload, reference: Run, got: Run) -> Iterator[RankedScores]:
    """Yield a ranking of each case's items by each of its labels.

    Items with the same prompt are taken once.
    """
    for case in workload.cases:
        yield from _rankings(case, reference, got)


def _rankings(case: Case, reference: Run, got: Run) -> Iterator[RankedScores]:
    first = {tuple(ids): row for row, ids in reversed(list(enumerate(case.prompt_ids())))}
    rows = sorted(first.values())
    if case.same_labels and len(rows) >= RANKED:
        right, other = (
            reference.results[case.name].values[rows],
            got.results[case.name].values[rows],
        )
        for label in range(right.shape[1]):
            yield RankedScores(f"{case.name!r} by label {label}", right[:, label], other[:, label])


def best_labels(workload: Workload, reference: Run, got: Run) -> ByQuery:
    """Return for each item with two or more labels 1 if its best label differs, or else 0."""
    numbers, parts = query_numbers(workload), []
    for case in workload.cases:
        right, other = reference.results[case.name].values, got.results[case.name].values
        several = asked(case).sum(axis=1) > 1
        if several.any():
            # A score that is NaN is never the best one.
            best = [
                np.argmax(np.where(np.isnan(values[several]), -np.inf, values[several]), axis=1)
                for values in (right, other)
            ]
            parts.append((numbers[case.name], (best[0] != best[1]).astype(np.float64)))
    return ByQuery.join(parts)


def threshold_flips(workload: Workload, reference: Run, got: Run) -> ByQuery:
    """Return for each ranked item 1 if it is on the other side of a threshold, or else 0.

    The threshold is in the middle of the ranking that counts as right, between two items.
    """
    numbers, parts = query_numbers(workload), []
    for case in workload.cases:
        for ranking in _rankings(case, reference, got):
            ordered = np.sort(ranking.reference)
            middle = len(ordered) // 2
            threshold = (ordered[middle - 1] + ordered[middle]) / 2
            flips = (ranking.reference > threshold) != (ranking.got > threshold)
            parts.append((numbers[case.name], flips.astype(np.float64)))
    return ByQuery.join(parts)


def divergence(workload: Workload, reference: Run, got: Run) -> ByQuery:
    """Return each item's Kullback-Leibler divergence, in nats, over its labels as softmax."""
    numbers, parts = query_numbers(workload), []
    for case in workload.cases:
        right, other = reference.results[case.name].values, got.results[case.name].values
        divergences = []
        for row, ids in enumerate(case.label_ids):
            _, columns = np.unique(ids, return_index=True)
            if len(columns) > 1:
                p, q = (
                    v[row, columns] - np.logaddexp.reduce(v[row, columns]) for v in (right, other)
                )
                divergences.append(float((np.exp(p) * (p - q)).sum()))
        if divergences:
            parts.append((numbers[case.name], np.array(divergences)))
    return ByQuery.join(parts)


@dataclass(frozen=True, slots=True)
class ByLength:
    """Differences in log p with the lengths of what was scored, in tokens."""

    log_p: Float64Array  # [scores]
    prompt: Float64Array  # the position that was scored is the last of these
    item: Float64Array  # NaN of an item that was sent as text


def by_length(workload: Workload, reference: Run, got: Run) -> ByLength:
    """Return all differences in log p with lengths."""
    log_p, prompts, items = [], [], []
    for case in workload.cases:
        there = asked(case)
        log_p.append((got.results[case.name].values - reference.results[case.name].values)[there])
        prompt = np.array([len(ids) for ids in case.prompt_ids()], float)
        item = [math.nan if isinstance(text, str) else len(text) for text in case.items]
        prompts.append(np.repeat(prompt, there.sum(axis=1)))
        items.append(np.repeat(np.array(item, float), there.sum(axis=1)))
    return ByLength(*map(np.concatenate, (log_p, prompts, items)))


def by_query(workload: Workload, reference: Run, got: Run) -> tuple[int, Mapping[str, Interval]]:
    """Return the number of queries, and measures with intervals by bootstrap over queries."""
    numbers = query_numbers(workload)
    count = len(set(numbers.values()))
    signed, taus = [], []
    for case in workload.cases:
        difference = got.results[case.name].values - reference.results[case.name].values
        signed.append((numbers[case.name], difference[asked(case)]))
        agreements = [
            kendall_tau_b(ranking.reference, ranking.got)
            for ranking in _rankings(case, reference, got)
        ]
        taus.append((numbers[case.name], np.array(agreements)))
    resamples, bias = Resamples(count), ByQuery.join(signed)
    sizes = np.abs(bias.values)
    return count, {
        "bias of log p": resamples.mean(*bias),
        "mean |d log p|": resamples.mean(sizes, bias.queries),
        "p99 |d log p|": resamples.quantile(sizes, bias.queries, 0.99),
        "mean tau-b": resamples.mean(*ByQuery.join(taus)),
        "best label flips": resamples.mean(*best_labels(workload, reference, got)),
        "threshold flips": resamples.mean(*threshold_flips(workload, reference, got)),
        "KL over labels": resamples.mean(*divergence(workload, reference, got)),
    }
