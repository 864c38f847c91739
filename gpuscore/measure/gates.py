"""The gates: limits on the differences between runs, and the origin of their numbers.

The numbers come from the tolerances of SGLang, vLLM, FlashInfer and transformers in their own
tests, and from measured noise:

- Against another run, errors have limits by the less exact format of the two (`LIMITS`). Those of
  half precision are wide, because honest rounding must not count as wrong: on SmolLM2 transformers
  in bfloat16 is 0.23 off at p99, and two such runs differ by more than one does from float32.
- `relative`, beside transformers in the same half-precision format: the error against float32 is
  at most 1.5 times transformers' (eager attention), at median, p99 and maximum.
- `rank`: no inversion among pairs that are over twice the allowed p99 error apart. `tau-b`: at
  least as high as with errors of the size that is allowed (`noise.py`). Allowed errors count, not
  measured ones, so that a bad backend does not widen its own margin. There is no gate on NDCG,
  because a random workload has no graded items.
- `label mass`: it is the sum of its labels' probabilities, which the other gates judge, up to 1e-6.
- `packing`: an item's scores alone and with other items differ by no more than two runs of one
  machine may; with --deterministic they have the same bits.

A gate that cannot judge says so: it is skipped, with the reason.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.measure.agreement import (
    RANKED,
    Agreement,
    agree,
    kendall_tau_b,
    log_p_differences,
    mass_error,
)
from gpuscore.measure.noise import least_tau, normal, up_to
from gpuscore.measure.results import Errors, Run, errors
from gpuscore.measure.workload import Workload
from gpuscore.types.batch import Float64Array

RELATIVE, MASS = 1.5, 1e-6


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the differences of two runs.

    Attributes:
        gate: its name.
        p99, maximum: in log p.
        probability: largest difference of a probability.
        packed: in log p, of an item alone and in company.
        allowed: sizes of the errors in log p that the order must bear.
    """

    gate: str
    p99: float
    maximum: float
    probability: float
    packed: float
    allowed: Float64Array


# From the most exact to the least exact format. In eight bits the noise is larger than any
# dtype's: items are judged by their order, and by the error at p99.
LIMITS = {
    "float32": Limits("float32", math.inf, 1e-4, math.inf, 1e-4, up_to(1e-4)),
    "half": Limits("absolute", 0.5, 1.0, 0.02, 0.15, normal(0.5, 1.0)),
    "eight bits": Limits("eight bits", 0.25, *(math.inf,) * 2, 0.15, normal(0.25)),
}


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


def skipped(subject: str, gate: str, reason: str) -> Verdict:
    """Return the verdict of a gate that cannot judge."""
    return Verdict(subject, gate, None, f"skipped, because {reason}")


def kind(run: Run) -> str:
    """Return the name of a run's limits in `LIMITS`."""
    if run.in_eight_bits:
        return "eight bits"
    return "float32" if run.dtype == "float32" else "half"


def judge(
    workload: Workload, exact: Run, rounded: Run | None, run: Run
) -> tuple[Agreement, list[Verdict]]:
    """Judge a run by comparing it with transformers in float32.

    Args:
        workload: the requests of all runs.
        exact: transformers in float32.
        rounded: transformers in the run's own half-precision format, by whose error the run is
            judged; None: by `LIMITS`.
        run: the run that is judged.
    """
    if rounded is None or kind(run) != "half":
        limits = LIMITS[kind(run)]
        allowed = limits.allowed
        found = agree(workload, exact, run, clear_gap(allowed))
        size = _within(run.name, found, limits)
    else:
        noise = log_p_differences(workload, exact, rounded)
        allowed = RELATIVE * np.abs(noise[np.isfinite(noise)])
        found = agree(workload, exact, run, clear_gap(allowed))
        size = _relative(found, errors(noise))
    order = _order(run.name, found, allowed)
    return found, [size, *order, _label_mass(run.name, [found.mass]), packing(run)]


def judge_pair(workload: Workload, first: Run, second: Run) -> tuple[Agreement, list[Verdict]]:
    """Judge two runs by `LIMITS`; the one in the more exact format counts as right."""
    exactness = list(LIMITS)
    if exactness.index(kind(second)) < exactness.index(kind(first)):
        first, second = second, first
    subject, limits = f"{second.name} against {first.name}", LIMITS[kind(second)]
    found = agree(workload, first, second, clear_gap(limits.allowed))
    masses = [mass_error(workload, first), found.mass]
    return found, [
        _within(subject, found, limits),
        *_order(subject, found, limits.allowed),
        _label_mass(subject, masses),
    ]


def _within(subject: str, found: Agreement, limits: Limits) -> Verdict:
    measured = (
        ("p99 |d log p|", found.log_p.p99, limits.p99),
        ("max |d log p|", found.log_p.maximum, limits.maximum),
        ("max |d p|", found.p.maximum, limits.probability),
    )
    held = [(name, value, limit) for name, value, limit in measured if limit < math.inf]
    detail = "; ".join(f"{name} {value:.1e}, at most {limit:g}" for name, value, limit in held)
    passed = all(value <= limit for _, value, limit in held)
    return Verdict(subject, limits.gate, passed, detail)


def _relative(found: Agreement, theirs: Errors) -> Verdict:
    ours = found.log_p
    parts = (
        ("median", ours.median, RELATIVE * theirs.median),
        ("p99", ours.p99, RELATIVE * theirs.p99),
        ("max", ours.maximum, RELATIVE * theirs.maximum),
    )
    said = ", ".join(f"{name} {value:.1e} of {limit:.1e}" for name, value, limit in parts)
    detail = f"{RELATIVE:g} times transformers' own {found.got.dtype} error: {said}"
    passed = all(value <= limit for _, value, limit in parts)
    return Verdict(found.got.name, "relative", passed, detail)


def clear_gap(allowed: Float64Array) -> float:
    """Return the gap in log p between two items over which their order is clear."""
    return 2 * errors(allowed).p99


def _order(subject: str, found: Agreement, allowed: Float64Array) -> Iterator[Verdict]:
    """Yield the verdicts on the order of items."""
    if found.clear_pairs:
        detail = f"{found.inversions} inversions of {found.clear_pairs} clear pairs"
        yield Verdict(subject, "rank", found.inversions == 0, detail)
    else:
        reason = f"no two items of a ranking are over {clear_gap(allowed):.1e} apart in log p"
        yield skipped(subject, "rank", reason)
    limits = [(ranking, least_tau(ranking.reference, allowed)) for ranking in found.rankings]
    told = [
        (kendall_tau_b(ranking.reference, ranking.got), least, ranking.name)
        for ranking, least in limits
        if least is not None
    ]
    if not told:
        reason = f"no request ranks {RANKED} different items"
        if limits:
            reason = f"the allowed noise hides the order of all {len(limits)} rankings"
        yield skipped(subject, "tau-b", reason)
        return
    # NaN is the worst: a ranking of equal or missing scores agrees with none.
    tau, least, name = min(told, key=lambda one: np.nan_to_num(one[0] - one[1], nan=-np.inf))
    detail = f"tau-b {tau:.4f} in {name}, at least {least:.4f}; the worst of {len(told)} rankings"
    yield Verdict(subject, "tau-b", bool(tau >= least), detail)


def _label_mass(subject: str, masses: Sequence[float | None]) -> Verdict:
    known = [mass for mass in masses if mass is not None]
    if not known:
        return skipped(subject, "label mass", "the scores have none")
    detail = f"{max(known):.1e} from the sum of the labels, at most {MASS:g}"
    return Verdict(subject, "label mass", max(known) <= MASS, detail)


def packing(run: Run) -> Verdict:
    """Return the verdict on items that were scored alone, too."""
    if run.alone is None:
        return skipped(run.name, "packing", "no item of the run was scored alone")
    limit = 0.0 if run.deterministic else LIMITS[kind(run)].packed
    detail = f"alone and in company max |d log p| {run.alone.maximum:.1e}, at most {limit:g}"
    return Verdict(run.name, "packing", run.alone.maximum <= limit, detail)
