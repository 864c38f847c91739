"""The verdict on eight bits at start: the serving model's answers against float32's.

The texts are held out: they did not decide which products stay in 16 bits.
"""

import logging
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from gpuscore.backends.base import Backend
from gpuscore.backends.common.eight_bits.recipe import Recipe
from gpuscore.errors import ConfigError
from gpuscore.types.batch import NO_TOKENS, Float64Array, Prefix, RowScores, Segment, pack

logger = logging.getLogger(__name__)

LEAST_TAU = 0.9  # of the order of held-out texts by their margin
MOST_FLIPS = 0.05  # share of held-out texts whose best label may be another one
INTERVAL = 0.95
Z = NormalDist().inv_cdf((1 + INTERVAL) / 2)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences between answers in eight bits and answers in float32.

    Args:
        error: mean of |d log p|, in nats, over texts and labels.
        spread: half the width of the error's interval of 95 %, over texts.
        tau_b: Kendall's, of the texts ordered by the margin between the labels.
        flips: texts whose best label is another one.
        texts: number of texts.
    """

    error: float
    spread: float
    tau_b: float
    flips: int
    texts: int

    @property
    def tau_spread(self) -> float:
        """Half the width of tau's interval of 95 % (Fieller, Hartley and Pearson, 1957)."""
        return Z * float((0.437 / max(1, self.texts - 4)) ** 0.5) * (1 - self.tau_b**2)

    def __str__(self) -> str:
        least, most = self.error - self.spread, self.error + self.spread
        return (
            f"mean error in log p {self.error:.3f} ({least:.3f} to {most:.3f}), tau-b "
            f"{self.tau_b:.3f}, another best label for {self.flips} of {self.texts} held-out texts"
        )

    def problem(self, most_error: float) -> str | None:
        """Say which limits are exceeded; None if all are met. A NaN exceeds every limit."""
        over = [
            text
            for fine, text in (
                (self.error <= most_error, f"--quantization-error allows {most_error:g}"),
                (self.tau_b >= LEAST_TAU, f"tau-b has to be at least {LEAST_TAU:g}"),
                (self.flips <= MOST_FLIPS * self.texts, f"at most {MOST_FLIPS:.0%} may flip"),
            )
            if not fine
        ]
        return ", ".join(over) if over else None

    def at_most(self, most_error: float) -> bool:
        """Return whether other texts would probably be within all limits, too."""
        surely = replace(self, error=self.error + self.spread, tau_b=self.tau_b - self.tau_spread)
        return surely.problem(most_error) is None


def values(label_logits: Float64Array, lse: Float64Array, classes: int | None) -> Float64Array:
    """Return the numbers to compare, [texts, labels]: log p; for a model with one class the logit.

    Args:
        label_logits: [texts, labels].
        lse: log-sum-exp over the vocabulary or all classes, [texts].
        classes: of a classification model; None = labels are tokens.
    """
    return label_logits if classes == 1 else label_logits - lse[:, None]


def compared(expected: Float64Array, got: Float64Array) -> Agreement:
    """Compare answers [texts, labels] in eight bits with answers in float32."""
    off = np.abs(got - expected).mean(axis=1)
    margins = [answers[:, 0] - answers[:, 1:].sum(axis=1) for answers in (expected, got)]
    flips = int((expected.argmax(axis=1) != got.argmax(axis=1)).sum())
    spread = Z * float(off.std(ddof=1)) / len(off) ** 0.5
    return Agreement(float(off.mean()), spread, tau_b(*margins), flips, len(off))


def tau_b(a: Float64Array, b: Float64Array) -> float:
    """Return Kendall's tau-b of two lists [n]; 1 if both are constant, 0 if one is."""
    first, second = (np.sign(np.subtract.outer(numbers, numbers)) for numbers in (a, b))
    of_first, of_second = np.abs(first).sum(), np.abs(second).sum()
    if not of_first or not of_second:
        return float(of_first == of_second)
    return float((first * second).sum() / np.sqrt(of_first * of_second))


def judge(backend: Backend, recipe: Recipe, most_error: float, allow: bool) -> Agreement:
    """Ask the held-out texts, log the figures.

    Args:
        backend: loaded with the recipe.
        recipe: has the texts and the answers in float32.
        most_error: the largest mean error in log p.
        allow: log the reasons that would refuse the model.

    Raises:
        ConfigError: the answers differ by more than is allowed.
    """
    agreement = compared(np.array(recipe.answers), answers_of(backend, recipe))
    problem = agreement.problem(most_error)
    if problem is None:
        logger.info("eight bits: %s; %s", agreement, recipe.about)
    elif allow:
        logger.warning("eight bits: %s, but %s (--allow-degenerate)", agreement, problem)
    else:
        raise ConfigError(
            f"the model in eight bits does not answer as in float32: {agreement}, but {problem}; "
            f"{recipe.about}; serve it without --quantization (a quantised checkpoint: with "
            "--quantization w8a16), with texts like yours "
            "(--quantization-texts FILE), with another --quantization-error, or in spite of that "
            "with --allow-degenerate"
        )
    return agreement


def answers_of(backend: Backend, recipe: Recipe) -> Float64Array:
    """Return the `values` of a recipe's prompts, [prompts, labels]."""
    limits = backend.limits
    labels, parts = np.array(recipe.labels, dtype=np.int32), []
    batch: list[Segment] = []

    def run() -> None:
        packed = pack(batch, [Prefix(0, NO_TOKENS)] * len(batch))
        parts.append(_values(backend.collect(backend.extend(packed)), limits.classes))
        batch.clear()

    for prompt in recipe.prompts:
        if sum(len(segment.token_ids) for segment in batch) + len(prompt) > limits.max_tokens:
            run()
        tokens = np.array(prompt, dtype=np.int32)
        batch.append(Segment(tokens, 0, len(batch), label_ids=labels, need_lse=True))
    run()
    return np.concatenate(parts)


def _values(scores: RowScores, classes: tuple[str, ...] | None) -> Float64Array:
    assert scores.lse is not None  # noqa: S101  (it was asked for)
    lse = scores.lse.astype(float)
    logits = scores.label_logits.reshape(len(lse), -1).astype(float)
    return values(logits, lse, None if classes is None else len(classes))
