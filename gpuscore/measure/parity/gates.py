"""The gates: limits on the differences between runs, and the origin of their numbers.

The numbers come from the project's research on parity ("Proposed gates"), which took them from the
tolerances of SGLang, vLLM, FlashInfer and transformers in their own tests, and from measured noise:

1. Kernels have their own tests (`tests/kernels`) and are not judged here.
2. Relative, the main gate: the error against float32 is at most 1.5 times transformers' in the
   same half-precision format (eager attention), at median, p99 and maximum.
3. Absolute: float32 backends differ by at most 1e-4 in log p; half-precision ones by 0.05 at p99,
   0.15 at most, and 0.01 in probability.
4. Rank: no inversion among pairs whose float32 gap is over twice the p99 error. tau-b and top-10
   overlap are at least as high as with errors of the size that gate 2 or 3 allows (`noise.py`).
   Allowed errors count, not measured ones, so that a bad backend does not widen its own margin.
   There is no gate on NDCG, because a random workload has no graded items.
5. and 6. An item's scores alone and with other items differ by no more than gate 3 allows; with
   --deterministic they have the same bits.
7. Linear layers in eight bits are judged against float32 by how items are ordered: tau-b at least
   0.99 for 100 items or more whose log-odds are spread by 2 nats (standard deviation), the best
   label another one for at most 1 % of items, no inversion among pairs that are twice the allowed
   error apart, and an error in log p of at most 0.25 at p99. Gates 2 and 3 do not apply: the noise
   of eight bits is larger than any dtype's. Among fewer items a single swap costs over 0.01.
   Log-odds are compared, because log p ends at 0, where half of the items have nearly the same.

8. A label mass is the sum of its labels' probabilities, which the other gates judge, up to 1e-6.

A gate that cannot judge says so: it is skipped, with the reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gpuscore.measure.parity.measures import RANKED, best_labels, differences, mass_errors, rankings
from gpuscore.measure.parity.metrics import (
    Errors,
    RankAgreement,
    RankedScores,
    errors,
    kendall_tau_b,
    log_odds,
    rank,
)
from gpuscore.measure.parity.noise import (
    Agreement,
    PermittedNoise,
    TauB,
    TopOverlap,
    WorstRanking,
    worst_ranking,
)
from gpuscore.measure.parity.results import Run
from gpuscore.measure.parity.workload import Workload

RELATIVE = 1.5
FLOAT32 = 1e-4
MASS = 1e-6
EIGHT_P99, SPREAD, MANY, FLIPS, TAU = 0.25, 2.0, 100, 0.01, 0.99
ALLOWED_FLOAT32 = PermittedNoise.up_to(FLOAT32)
ALLOWED_EIGHT = PermittedNoise.normal(EIGHT_P99)


@dataclass(frozen=True, slots=True)
class HalfLimits:
    """Limits of gate 3 on half precision: p99 and maximum in log p, and maximum in probability."""

    p99: float
    maximum: float
    probability: float


HALF = HalfLimits(0.05, 0.15, 0.01)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one gate for a run or a pair of runs."""

    subject: str
    gate: str
    passed: bool | None  # None: the gate was skipped
    detail: str

    @property
    def failed(self) -> bool:
        return self.passed is False


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of a run from another one that counts as right."""

    reference: Run
    got: Run
    log_p: Errors
    p: Errors
    ranking: RankAgreement
    rankings: tuple[RankedScores, ...]
    allowed: PermittedNoise


def skipped(subject: str, gate: str, reason: str) -> Verdict:
    """Return the verdict of a gate that cannot judge."""
    return Verdict(subject, gate, None, f"skipped, because {reason}")


def compare(workload: Workload, reference: Run, got: Run, allowed: PermittedNoise) -> Comparison:
    """Compare two runs of one workload.

    Args:
        workload: the requests of both runs.
        reference: the run that counts as right.
        got: the run that is judged.
        allowed: errors of `got` in log p that are allowed.
    """
    log_p, p = differences(workload, reference, got)
    ranked = tuple(rankings(workload, reference, got))
    agreement = rank(ranked, 2 * allowed.clear)
    return Comparison(reference, got, errors(log_p), errors(p), agreement, ranked, allowed)


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
        comparison = compare(workload, exact, run, ALLOWED_FLOAT32)
        return comparison, [
            _at_most(run.name, comparison.log_p, FLOAT32),
            *_order_verdicts(comparison),
            _label_mass(run.name, workload, run),
            packing(run),
        ]
    noise = differences(workload, exact, rounded)[0]
    theirs = errors(noise)
    allowed = PermittedNoise.multiple(RELATIVE, noise, theirs.p99)
    comparison = compare(workload, exact, run, allowed)
    return comparison, [
        _relative(comparison, theirs),
        *_order_verdicts(comparison),
        _label_mass(run.name, workload, run),
        packing(run),
    ]


def judge_pair(
    workload: Workload, first: Run, second: Run, half: HalfLimits = HALF
) -> tuple[Comparison, list[Verdict]]:
    """Judge two runs by gates 3 and 4; if only one of them is float32, it counts as right.

    If only one of them is in eight bits, gate 7 judges it. `half` has gate 3's limits on half
    precision.
    """
    if first.in_eight_bits != second.in_eight_bits:
        first, second = (second, first) if first.in_eight_bits else (first, second)
        return _judge_eight_bits(
            workload, first, replace(second, name=f"{second.name} against {first.name}")
        )
    eight_bits = first.in_eight_bits  # and so is `two`: the least difference may round otherwise
    if second.dtype == "float32" != first.dtype:
        first, second = second, first
    subject = f"{second.name} against {first.name}"
    if second.dtype == "float32" and not eight_bits:
        comparison = compare(workload, first, second, ALLOWED_FLOAT32)
        return comparison, [
            _at_most(subject, comparison.log_p, FLOAT32),
            *_order_verdicts(comparison, subject),
            _label_mass(subject, workload, first, second),
        ]
    comparison = compare(workload, first, second, PermittedNoise.normal(half.p99, half.maximum))
    return comparison, [
        _absolute(subject, comparison, half),
        *_order_verdicts(comparison, subject),
        _label_mass(subject, workload, first, second),
    ]


def _judge_eight_bits(workload: Workload, exact: Run, run: Run) -> tuple[Comparison, list[Verdict]]:
    """Judge a run in eight bits by gate 7."""
    comparison = compare(workload, exact, run, ALLOWED_EIGHT)
    p99 = comparison.log_p.p99
    detail = f"|d log p| p99 {p99:.1e}, at most {EIGHT_P99}"
    return comparison, [
        Verdict(run.name, "eight bits", p99 <= EIGHT_P99, detail),
        _inversions(comparison, run.name),
        _long_lists(comparison, run.name),
        _best_label(workload, comparison, run.name),
        _label_mass(run.name, workload, run),
        packing(run),
    ]


def _long_lists(comparison: Comparison, subject: str) -> Verdict:
    taus = [
        kendall_tau_b(ranking.reference, ranking.got)
        for ranking in comparison.rankings
        if len(ranking.reference) >= MANY and log_odds(ranking.reference).std() >= SPREAD
    ]
    if not taus:
        reason = f"no ranking of {MANY} items or more is spread by {SPREAD:g} nats"
        return skipped(subject, "tau-b", reason)
    worst = float(np.min(taus))  # NaN, if one is
    detail = f"tau-b {worst:.4f}, at least {TAU}, of {len(taus)} rankings spread by 2 nats"
    return Verdict(subject, "tau-b", worst >= TAU, detail)


def _best_label(workload: Workload, comparison: Comparison, subject: str) -> Verdict:
    flips = best_labels(workload, comparison.reference, comparison.got).values
    if not flips.size:
        return skipped(subject, "best label", "no item has two labels")
    count = int(flips.sum())
    detail = f"best label of {count} of {flips.size} items is another, at most {FLIPS:.0%}"
    return Verdict(subject, "best label", count <= FLIPS * flips.size, detail)


def _at_most(subject: str, measured: Errors, limit: float) -> Verdict:
    detail = f"max |d log p| {measured.maximum:.1e}, at most {limit:g}"
    return Verdict(subject, "float32", measured.maximum <= limit, detail)


def _relative(comparison: Comparison, theirs: Errors) -> Verdict:
    ratios, passed = [], True
    parts: tuple[tuple[str, Callable[[Errors], float]], ...] = (
        ("median", lambda e: e.median),
        ("p99", lambda e: e.p99),
        ("max", lambda e: e.maximum),
    )
    for name, part in parts:
        ours, limit = part(comparison.log_p), RELATIVE * part(theirs)
        passed = passed and ours <= limit
        ratios.append(f"{name} {ours:.1e} of {limit:.1e}")
    detail = (
        f"{RELATIVE:g} times transformers' own {comparison.got.dtype} error: {', '.join(ratios)}"
    )
    return Verdict(comparison.got.name, "relative", passed, detail)


def _absolute(subject: str, comparison: Comparison, limits: HalfLimits) -> Verdict:
    log_p, p = comparison.log_p, comparison.p.maximum
    passed = log_p.p99 <= limits.p99 and log_p.maximum <= limits.maximum and p <= limits.probability
    detail = (
        f"|d log p| p99 {log_p.p99:.1e} of {limits.p99}, max {log_p.maximum:.1e} of "
        f"{limits.maximum}; |d p| {p:.1e} of {limits.probability}"
    )
    return Verdict(subject, "absolute", passed, detail)


def _order_verdicts(comparison: Comparison, subject: str | None = None) -> Iterator[Verdict]:
    """Yield the verdicts of gate 4."""
    subject = subject or comparison.got.name
    yield _inversions(comparison, subject)
    yield _order(comparison, subject, "tau-b", TauB())
    yield _order(comparison, subject, "top-10", TopOverlap())


def _inversions(comparison: Comparison, subject: str) -> Verdict:
    ranking = comparison.ranking
    if not ranking.clear_pairs:
        reason = (
            f"no two items of a ranking are over {2 * comparison.allowed.clear:.1e} apart in log p"
        )
        return skipped(subject, "rank", reason)
    detail = f"{ranking.inversions} inversions of {ranking.clear_pairs} clear pairs"
    return Verdict(subject, "rank", ranking.inversions == 0, detail)


def _order(comparison: Comparison, subject: str, gate: str, agreement: Agreement) -> Verdict:
    worst = worst_ranking(comparison.rankings, comparison.allowed, agreement)
    if worst is None:
        reason = f"no request ranks {max(RANKED, agreement.fewest)} different items"
        return skipped(subject, gate, reason)
    if worst.within and not worst.telling:
        reason = f"the allowed noise hides the order of all {worst.rankings} rankings"
        return skipped(subject, gate, f"{reason}: {_measured(worst)}, which a random order reaches")
    detail = f"{gate} {_measured(worst)}, {worst.expected:.4f} expected"
    of = f"the worst of {worst.rankings} rankings; {worst.telling} of them can tell"
    return Verdict(subject, gate, worst.within, f"{detail}; {of}")


def _measured(worst: WorstRanking) -> str:
    return f"{worst.measured:.4f} in {worst.name}, at least {worst.least:.4f}"


def _label_mass(subject: str, workload: Workload, *runs: Run) -> Verdict:
    """Return the verdict of gate 8."""
    sizes = np.concatenate([mass_errors(workload, run) for run in runs])
    if not sizes.size:
        return skipped(subject, "label mass", "the scores have none")
    maximum = errors(sizes).maximum
    detail = f"{maximum:.1e} from the sum of the labels, at most {MASS:g}"
    return Verdict(subject, "label mass", maximum <= MASS, detail)


def packing(run: Run) -> Verdict:
    """Return the verdict of gates 5 and 6."""
    if run.alone is None:
        return skipped(run.name, "packing", "no item of the run was scored alone")
    limit = FLOAT32 if run.dtype == "float32" and not run.in_eight_bits else HALF.maximum
    limit = 0.0 if run.deterministic else limit
    detail = f"alone and in company max |d log p| {run.alone.maximum:.1e}, at most {limit:g}"
    return Verdict(run.name, "packing", run.alone.maximum <= limit, detail)
