"""The gates: how much scores may differ before they count as wrong, and why.

The limits come from the tolerances that SGLang, vLLM, FlashInfer and transformers have in their own
tests, and from measured noise:

- `float32`, `absolute`, `eight bits`: the limits of the less exact format of the two (`LIMITS`).
  Those of half precision are wide, because rounding must not count as wrong: on SmolLM2
  transformers in bfloat16 differs by 0.23 from float32 at p99, and two bfloat16 runs differ more.
- `relative`, if transformers' scores in the same half-precision format are given: the error against
  float32 is at most 1.5 times transformers' (eager attention), at median, p99 and maximum.
- `rank`: no inversion among pairs that are further apart than twice the allowed p99 error. It is
  the allowed error, not the measured one, so that a bad backend does not widen its own margin.
  There is no gate on tau-b, because allowed errors may swap pairs that are close, and none on NDCG,
  because a random workload has no graded items.
- `label mass`: it equals the sum of the labels' probabilities up to 1e-6.
- `packing`: an item's scores alone and among others differ by at most the limit of their format
  (`Limits.packed`); with --deterministic they have the same bits.

A gate that cannot judge is skipped, and says why.
"""

import math
from dataclasses import dataclass

from gpuscore.measure.agreement import Agreement, agree, log_p_differences, mass_error
from gpuscore.measure.results import EIGHT_BITS, Measured, errors

RELATIVE = 1.5
MASS = 1e-6


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the differences between two sets of scores.

    Attributes:
        maximum, p99, median: differences of log p.
        probability: largest difference of a probability.
        packed: difference of log p between an item alone and among others.
    """

    gate: str
    maximum: float
    p99: float
    median: float = math.inf
    probability: float = math.inf
    packed: float = math.inf


# From the most exact to the least exact format. In eight bits the noise is larger than in any
# dtype, so there is no limit on the maximum: only on the error at p99, and on the order.
LIMITS = {
    "float32": Limits("float32", 1e-4, 1e-4, packed=1e-4),
    "half": Limits("absolute", 1.0, 0.5, probability=0.02, packed=0.15),
    "eight bits": Limits("eight bits", math.inf, 0.25, packed=0.15),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one gate."""

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


def kind(scored: Measured) -> str:
    """Return the key of `LIMITS` for these scores."""
    if scored.format in EIGHT_BITS:
        return "eight bits"
    return "float32" if scored.dtype == "float32" else "half"


def judge(
    first: Measured, second: Measured, rounded: Measured | None = None
) -> tuple[Agreement, list[Verdict]]:
    """Compare two sets of scores of one workload; the more exact format counts as right.

    Args:
        first, second: the scores.
        rounded: transformers' scores in the half-precision format of `second`, if `first` are
            transformers' in float32; the gate is then `relative`. None: the limits are `LIMITS`.
    """
    if rounded is not None and kind(second) == "half":
        error = errors(log_p_differences(first, rounded))
        allowed = (RELATIVE * size for size in (error.maximum, error.p99, error.median))
        limits = Limits("relative", *allowed)
        subject = second.name
    else:
        exactness = list(LIMITS)
        if exactness.index(kind(second)) < exactness.index(kind(first)):
            first, second = second, first
        limits = LIMITS[kind(second)]
        subject = f"{second.name} against {first.name}"
    found = agree(first, second, 2 * limits.p99)
    size = _within(subject, found, limits)
    return found, [size, _rank(subject, found, limits), _label_mass(subject, first, second)]


def _within(subject: str, found: Agreement, limits: Limits) -> Verdict:
    measured = (
        ("max |d log p|", found.log_p.maximum, limits.maximum),
        ("p99 |d log p|", found.log_p.p99, limits.p99),
        ("median |d log p|", found.log_p.median, limits.median),
        ("max |d p|", found.p, limits.probability),
    )
    limited = [(name, value, limit) for name, value, limit in measured if limit < math.inf]
    detail = "; ".join(f"{name} {value:.1e}, at most {limit:.2g}" for name, value, limit in limited)
    if limits.gate == "relative":
        detail = f"{RELATIVE:g} times transformers' own {found.got.dtype} error: {detail}"
    passed = all(value <= limit for _, value, limit in limited)
    return Verdict(subject, limits.gate, passed, detail)


def _rank(subject: str, found: Agreement, limits: Limits) -> Verdict:
    if not found.clear_pairs:
        reason = f"no two items of a ranking are over {2 * limits.p99:.1e} apart in log p"
        return skipped(subject, "rank", reason)
    detail = f"{found.inversions} inversions of {found.clear_pairs} clear pairs"
    return Verdict(subject, "rank", found.inversions == 0, detail)


def _label_mass(subject: str, *scored: Measured) -> Verdict:
    mass_errors = [error for error in map(mass_error, scored) if error is not None]
    if not mass_errors:
        return skipped(subject, "label mass", "the scores have none")
    detail = f"{max(mass_errors):.1e} from the sum of the labels, at most {MASS:g}"
    return Verdict(subject, "label mass", max(mass_errors) <= MASS, detail)


def packing(scored: Measured) -> Verdict:
    """Return the verdict on items that were also scored alone."""
    if scored.alone is None:
        return skipped(scored.name, "packing", "none of its items was scored alone")
    limit = 0.0 if scored.deterministic else LIMITS[kind(scored)].packed
    detail = f"alone and among others max |d log p| {scored.alone:.1e}, at most {limit:g}"
    return Verdict(scored.name, "packing", scored.alone <= limit, detail)
