"""Samples of one type of question: log-probabilities of the labels, and the right label."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuscore.prompts.calibration import Scaling
from gpuscore.types.batch import Float64Array

Places = NDArray[np.int64]
# Log-probabilities [L] of the labels, the label that answers in the order of the question's
# options, numbers of question and row, and whether the options stood in reverse order.
ReadSample: TypeAlias = tuple[Float64Array, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class Samples:
    """N reads of questions of one type.

    A question that is read in two orders has two reads; its answer is the mean of them.

    Args:
        logprobs: [N, most labels], in the order of the labels; -inf after the last one.
        right: [N], numbers of the right labels.
        questions: [N], numbers of the questions, from 0; both reads of a question have its number.
        rows: [N], numbers of the rows; questions of a row have a state in common.
        turned: [N], True if the options stood in reverse order.
    """

    logprobs: Float64Array
    right: Places
    questions: Places
    rows: Places
    turned: NDArray[np.bool_]

    @classmethod
    def of(cls, reads: Iterable[ReadSample]) -> "Samples":
        """Return samples of reads with different numbers of labels."""
        logprobs, right, questions, rows, turned = zip(*reads, strict=True)
        lengths = np.array([*map(len, logprobs)])
        table = np.full((len(lengths), lengths.max()), -np.inf)
        for target, row in zip(table, logprobs, strict=True):
            target[: len(row)] = row
        places = np.where(turned, lengths - 1 - np.array(right), right)
        numbers = np.array(questions)
        return cls(table, places.astype(np.int64), numbers, np.array(rows), np.array(turned))

    def __len__(self) -> int:
        return len(self.right)

    @property
    def num_questions(self) -> int:
        return len(np.unique(self.questions))

    def part(self, chosen: NDArray[np.bool_]) -> "Samples":
        """Return the samples for which `chosen` [N] is True."""
        return Samples(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def shares(self, scaling: Scaling) -> Float64Array:
        """Return probabilities [N, most labels] of the labels."""
        return scaling.shares(self.logprobs)


@dataclass(frozen=True, slots=True)
class Judged:
    """The answers to Q questions, beside the right answers.

    Args:
        shares: [Q, most labels], 0 after the last one, in the order of the options.
        right: [Q], the option that is right.
        rows: [Q], numbers of the rows.
    """

    shares: Float64Array
    right: Places
    rows: Places

    @classmethod
    def of(cls, samples: Samples, shares: Float64Array) -> "Judged":
        """Return each question's answer: the mean of its reads' shares [N, most labels]."""
        counts = np.isfinite(samples.logprobs).sum(axis=1)
        ordered, right = shares.copy(), samples.right.copy()
        for read in np.flatnonzero(samples.turned):
            ordered[read, : counts[read]] = shares[read, : counts[read]][::-1]
            right[read] = counts[read] - 1 - right[read]
        numbers, first, place = np.unique(samples.questions, return_index=True, return_inverse=True)
        sums = np.zeros((len(numbers), shares.shape[1]))
        np.add.at(sums, place, ordered)
        return cls(sums / np.bincount(place)[:, None], right[first], samples.rows[first])
