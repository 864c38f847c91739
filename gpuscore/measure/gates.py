"""The gates: limits on the differences between scores, and the origin of their numbers.

The numbers come from the tolerances of SGLang, vLLM, FlashInfer and transformers in their own
tests, and from measured noise:

- Against others, errors have limits by the less exact format of the two (`LIMITS`). Those of
  half precision are wide, because honest rounding must not count as wrong: on SmolLM2 transformers
  in bfloat16 is 0.23 off at p99, and two such runs differ by more than one does from float32.
- `relative`, beside transformers in the same half-precision format: the error against float32 is
  at most 1.5 times transformers' (eager attention), at median, p99 and maximum.
- `rank`: no inversion among pairs that are over twice the allowed p99 error apart. The allowed
  error counts, not the measured one, so that a bad backend does not widen its own margin. There is
  no gate on tau-b, because errors of the allowed sizes may swap any near pairs, nor on NDCG,
  because a random workload has no graded items.
- `label mass`: it is the sum of its labels' probabilities, which the other gates judge, up to 1e-6.
- `packing`: an item's scores alone and with other items differ by no more than two runs of one
  machine may; with --deterministic they have the same bits.

A gate that cannot judge says so: it is skipped, with the reason.
"""

import math
from dataclasses import dataclass

from gpuscore.measure.agreement import Agreement, agree, log_p_differences, mass_error
from gpuscore.measure.results import EIGHT_BITS, Measured, errors

RELATIVE = 1.5
MASS = 1e-6


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the differences of two that scored.

    Attributes:
        maximum, p99, median: differences of log p.
        probability: largest difference of a probability.
        packed: difference of log p between an item alone and in company.
    """

    gate: str
    maximum: float
    p99: float
    median: float = math.inf
    probability: float = math.inf
    packed: float = math.inf


# From the most exact to the least exact format. In eight bits the noise is larger than any
# dtype's: items are judged by their order, and by the error at p99.
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
    """Return the name of its limits in `LIMITS`."""
    if scored.format in EIGHT_BITS:
        return "eight bits"
    return "float32" if scored.dtype == "float32" else "half"


def judge(
    first: Measured, second: Measured, rounded: Measured | None = None
) -> tuple[Agreement, list[Verdict]]:
    """Judge scores by others, of which those in the more exact format count as right.

    Args:
        first, second: scored one workload.
        rounded: transformers in the half-precision format of `second`: its error, too, is measured
            from `first`, which is transformers in float32; None: `LIMITS` judge.
    """
    if rounded is not None and kind(second) == "half":
        theirs = errors(log_p_differences(first, rounded))
        sizes = (RELATIVE * size for size in (theirs.maximum, theirs.p99, theirs.median))
        limits = Limits("relative", *sizes)
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
    held = [(name, value, limit) for name, value, limit in measured if limit < math.inf]
    detail = "; ".join(f"{name} {value:.1e}, at most {limit:.2g}" for name, value, limit in held)
    if limits.gate == "relative":
        detail = f"{RELATIVE:g} times transformers' own {found.got.dtype} error: {detail}"
    passed = all(value <= limit for _, value, limit in held)
    return Verdict(subject, limits.gate, passed, detail)


def _rank(subject: str, found: Agreement, limits: Limits) -> Verdict:
    if not found.clear_pairs:
        reason = f"no two items of a ranking are over {2 * limits.p99:.1e} apart in log p"
        return skipped(subject, "rank", reason)
    detail = f"{found.inversions} inversions of {found.clear_pairs} clear pairs"
    return Verdict(subject, "rank", found.inversions == 0, detail)


def _label_mass(subject: str, *scored: Measured) -> Verdict:
    known = [mass for mass in map(mass_error, scored) if mass is not None]
    if not known:
        return skipped(subject, "label mass", "the scores have none")
    detail = f"{max(known):.1e} from the sum of the labels, at most {MASS:g}"
    return Verdict(subject, "label mass", max(known) <= MASS, detail)


def packing(scored: Measured) -> Verdict:
    """Return the verdict on items that were scored alone, too."""
    if scored.alone is None:
        return skipped(scored.name, "packing", "no item of it was scored alone")
    limit = 0.0 if scored.deterministic else LIMITS[kind(scored)].packed
    detail = f"alone and in company max |d log p| {scored.alone:.1e}, at most {limit:g}"
    return Verdict(scored.name, "packing", scored.alone <= limit, detail)
