"""The gates: limits on the differences between runs, and the origin of their numbers.

The numbers come from the project's research on parity ("Proposed gates"), which took them from the
tolerances of SGLang, vLLM, FlashInfer and transformers in their own tests, and from measured noise:

1. Kernels have their own tests (`tests/kernels`) and are not judged here.
2. Relative, the main gate: the error against float32 is at most twice that of transformers in the
   same half-precision format (eager attention), at median, p99 and maximum.
3. Absolute: float32 backends differ by at most 1e-4 in log p; half-precision ones by 0.05 at p99,
   0.15 at most, and 0.01 in probability.
4. Rank: no inversion among pairs whose float32 gap is over twice the p99 error; tau-b at least
   0.99 and top-10 overlap at least 0.9 on sets that are not degenerate. The p99 error is the one
   that gate 2 or 3 allows, not the measured one, so that a bad backend does not widen its own
   margin. There is no gate on NDCG, because a random workload has no graded items.
5. and 6. An item's scores alone and with other items differ by no more than gate 3 allows; with
   --deterministic they have the same bits.
7. Linear layers in eight bits are judged against float32 by how items are ordered: tau-b at least
   0.99 for 100 items or more whose log-odds are spread by 2 nats (standard deviation), the best
   label another one for at most 1 % of items, no inversion among pairs that are twice the allowed
   error apart, and an error in log p of at most 0.25 at p99. Gates 2 and 3 do not apply: the noise
   of eight bits is larger than that of any dtype. Among fewer items a single swap costs over 0.01.
   Log-odds, because a label's log p ends at 0: those of half the items are next to each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gpuscore.arrays import Float64Array
from gpuscore.parity.metrics import (
    Errors,
    RankAgreement,
    errors,
    kendall_tau_b,
    log_odds,
    rank,
)
from gpuscore.parity.runs import Run
from gpuscore.parity.workload import Workload

RELATIVE = 2.0
FLOAT32 = 1e-4
HALF_P99, HALF_MAX, HALF_PROBABILITY = 0.05, 0.15, 0.01
TAU, TOP = 0.99, 0.9
# A set is degenerate if a larger share of its pairs differs by less than the noise. If all those
# pairs were swapped, which noise alone may do, tau-b would be under TAU.
TIES = (1 - TAU) / 2
RANKED = 10  # least number of items in a ranking
EIGHT_P99, SPREAD, MANY, FLIPS = 0.25, 2.0, 100, 0.01


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one gate for a run or a pair of runs."""

    subject: str
    gate: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of a run from another one that counts as right."""

    want: Run
    got: Run
    log_p: Errors
    p: Errors
    ranking: RankAgreement


def compare(
    workload: Workload, want: Run, got: Run, allowed_p99: float, noise: float
) -> Comparison:
    """Compare two runs of one workload.

    Args:
        workload: the requests of both runs.
        want: the run that counts as right.
        got: the run that is judged.
        allowed_p99: allowed error of `got` in log p; a gap over twice that is clear.
        noise: scores of `want` that differ by no more than this count as tied.
    """
    log_p, p = differences(workload, want, got)
    ranking = rank(_ranked(workload, want, got), 2 * allowed_p99, noise, TIES)
    return Comparison(want, got, errors(log_p), errors(p), ranking)


def differences(workload: Workload, want: Run, got: Run) -> tuple[Float64Array, Float64Array]:
    """Return the differences of all log-probabilities, and of all probabilities and masses."""
    log_p, p = [], []
    for case in workload.cases:
        one, two = want.results[case.name], got.results[case.name]
        asked = np.concatenate(
            [np.arange(one.values.shape[1]) < len(ids) for ids in case.label_ids]
        )
        log_p.append((two.values - one.values).ravel()[asked])
        p.append((np.exp(two.values) - np.exp(one.values)).ravel()[asked])
        if one.mass is not None and two.mass is not None:
            p.append(two.mass - one.mass)
    return np.concatenate(log_p), np.concatenate(p)


def judge(
    workload: Workload, exact: Run, rounded: Run | None, run: Run
) -> tuple[Comparison, list[Verdict]]:
    """Judge a run by comparing it with transformers in float32.

    Args:
        workload: the requests of all runs.
        exact: transformers in float32.
        rounded: transformers in the run's own half-precision format; None for float32.
        run: the run that is judged.
    """
    if run.in_eight_bits:
        return _judge_eight_bits(workload, exact, run)
    if rounded is None:
        found = compare(workload, exact, run, FLOAT32, FLOAT32)
        return found, [
            _at_most(run.name, found.log_p, FLOAT32),
            *order_verdicts(found),
            *packing(run),
        ]
    theirs = errors(differences(workload, exact, rounded)[0])
    found = compare(workload, exact, run, RELATIVE * theirs.p99, theirs.p99)
    return found, [_relative(found, theirs), *order_verdicts(found), *packing(run)]


def judge_pair(workload: Workload, one: Run, two: Run) -> tuple[Comparison, list[Verdict]]:
    """Judge two runs by gates 3 and 4; if only one of them is float32, it counts as right.

    If only one of them is in eight bits, gate 7 judges it.
    """
    if one.in_eight_bits != two.in_eight_bits:
        one, two = (two, one) if one.in_eight_bits else (one, two)
        return _judge_eight_bits(workload, one, replace(two, name=f"{two.name} against {one.name}"))
    eight_bits = one.in_eight_bits  # and so is `two`: the least difference may round otherwise
    if two.dtype == "float32" != one.dtype:
        one, two = two, one
    subject = f"{two.name} against {one.name}"
    if two.dtype == "float32" and not eight_bits:
        found = compare(workload, one, two, FLOAT32, FLOAT32)
        return found, [_at_most(subject, found.log_p, FLOAT32), *order_verdicts(found, subject)]
    found = compare(workload, one, two, HALF_P99, HALF_P99)
    return found, [_absolute(subject, found.log_p, found.p), *order_verdicts(found, subject)]


def _judge_eight_bits(workload: Workload, exact: Run, run: Run) -> tuple[Comparison, list[Verdict]]:
    """Judge a run in eight bits by gate 7."""
    found = compare(workload, exact, run, EIGHT_P99, EIGHT_P99)
    p99 = found.log_p.p99
    detail = f"|d log p| p99 {p99:.1e}, at most {EIGHT_P99}"
    swaps = f"{found.ranking.inversions} inversions of {found.ranking.clear_pairs} clear pairs"
    verdicts = [
        Verdict(run.name, "eight bits", p99 <= EIGHT_P99, detail),
        Verdict(run.name, "rank", found.ranking.inversions == 0, swaps),
    ]
    taus = [
        kendall_tau_b(want, got)
        for want, got in _ranked(workload, exact, run)
        if log_odds(want).std() >= SPREAD and len(want) >= MANY
    ]
    if taus:
        detail = f"tau-b {min(taus):.4f}, at least {TAU}, of {len(taus)} rankings spread by 2 nats"
        verdicts.append(Verdict(run.name, "tau-b", min(taus) >= TAU, detail))
    flips, items = best_labels(workload, exact, run)
    if items:
        detail = f"best label of {flips} of {items} items is another, at most {FLIPS:.0%}"
        verdicts.append(Verdict(run.name, "best label", flips <= FLIPS * items, detail))
    return found, [*verdicts, *packing(run)]


def best_labels(workload: Workload, want: Run, got: Run) -> tuple[int, int]:
    """Return the number of items whose best label differs, and of all items with two or more."""
    flips = items = 0
    for case in workload.cases:
        one, two = want.results[case.name].values, got.results[case.name].values
        several = (~np.isnan(one)).sum(axis=1) > 1
        if several.any():
            best = (np.nanargmax(values[several], axis=1) for values in (one, two))
            flips += int(np.not_equal(*best).sum())
            items += int(several.sum())
    return flips, items


def _at_most(subject: str, found: Errors, limit: float) -> Verdict:
    detail = f"max |d log p| {found.maximum:.1e}, at most {limit:g}"
    return Verdict(subject, "float32", found.maximum <= limit, detail)


def _relative(found: Comparison, theirs: Errors) -> Verdict:
    ratios, passed = [], True
    parts: tuple[tuple[str, Callable[[Errors], float]], ...] = (
        ("median", lambda e: e.median),
        ("p99", lambda e: e.p99),
        ("max", lambda e: e.maximum),
    )
    for name, part in parts:
        ours, limit = part(found.log_p), RELATIVE * part(theirs)
        passed = passed and ours <= limit
        ratios.append(f"{name} {ours:.1e} of {limit:.1e}")
    detail = f"twice transformers' own {found.got.dtype} error: {', '.join(ratios)}"
    return Verdict(found.got.name, "relative", passed, detail)


def _absolute(subject: str, log_p: Errors, p: Errors) -> Verdict:
    passed = log_p.p99 <= HALF_P99 and log_p.maximum <= HALF_MAX and p.maximum <= HALF_PROBABILITY
    detail = (
        f"|d log p| p99 {log_p.p99:.1e} of {HALF_P99}, max {log_p.maximum:.1e} of {HALF_MAX}; "
        f"|d p| {p.maximum:.1e} of {HALF_PROBABILITY}"
    )
    return Verdict(subject, "absolute", passed, detail)


def order_verdicts(found: Comparison, subject: str | None = None) -> Iterator[Verdict]:
    """Yield the verdicts of gate 4."""
    subject, ranking = subject or found.got.name, found.ranking
    detail = f"{ranking.inversions} inversions of {ranking.clear_pairs} clear pairs"
    yield Verdict(subject, "rank", ranking.inversions == 0, detail)
    if ranking.clear_tau is not None:
        detail = f"tau-b {ranking.clear_tau:.4f} of rankings that are no near ties, at least {TAU}"
        yield Verdict(subject, "tau-b", ranking.clear_tau >= TAU, detail)
    if ranking.clear_top is not None:
        detail = f"top-10 overlap {ranking.clear_top:.2f} of the same, at least {TOP}"
        yield Verdict(subject, "top-10", ranking.clear_top >= TOP, detail)


def packing(run: Run) -> Iterator[Verdict]:
    """Yield the verdict of gates 5 and 6, if the run has scores of single items."""
    if run.alone is None:
        return
    limit = FLOAT32 if run.dtype == "float32" and not run.in_eight_bits else HALF_MAX
    limit = 0.0 if run.deterministic else limit
    detail = f"alone and in company max |d log p| {run.alone.maximum:.1e}, at most {limit:g}"
    yield Verdict(run.name, "packing", run.alone.maximum <= limit, detail)


def _ranked(workload: Workload, want: Run, got: Run) -> Iterator[tuple[Float64Array, Float64Array]]:
    """Yield (want, got) for each label of each case: a ranking of its items by that label.

    Items with the same prompt are taken once.
    """
    for case in workload.cases:
        first = {tuple(ids): row for row, ids in reversed(list(enumerate(case.prompt_ids())))}
        rows = sorted(first.values())
        if case.same_labels and len(rows) >= RANKED:
            one, two = want.results[case.name].values, got.results[case.name].values
            yield from zip(one[rows].T, two[rows].T, strict=True)
