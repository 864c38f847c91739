"""Reads of typed questions: the rows of a request that hold their labels, and the answers.

A read is one prompt whose next tokens are a label. Labels of one token need the row of the prompt
alone; labels of several also need the rows of their first tokens, which continue the prompt as
items of their own (`LabelTrie`). So one request holds questions with labels of any kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.prompts.calibration import Calibration, Kind
from gpuscore.types.batch import BackendLimits, Float64Array
from gpuscore.types.labels import label_logprobs, with_families
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt of a question.

    Args:
        question: its number.
        kind: the question's type.
        trie: its labels.
        row: number of the prompt's row in the request; the rows of the trie's nodes follow it.
        turned: its options stand in reverse order.
    """

    question: int
    kind: Kind
    trie: LabelTrie
    row: int
    turned: bool = False


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The model's answer to a question; the mean of its reads, if there are several.

    Attributes:
        shares: [L], probabilities of the labels among themselves, in the question's order.
        label_mass: probability of all labels together, over the whole vocabulary.
        argmax_is_label: in every read the most probable text is a label; None if it is not known.
    """

    shares: Float64Array
    label_mass: float
    argmax_is_label: bool | None

    @property
    def best(self) -> int:
        """Number of the most probable label; of equals the first."""
        return int(np.argmax(self.shares))

    @property
    def mean(self) -> float:
        """The mean of the labels' numbers, counted from 0, weighted by their probabilities."""
        return float(sum(n * share for n, share in enumerate(self.shares.tolist())))

    @property
    def confidence(self) -> float:
        """The most probable label's probability over the whole vocabulary, from 0 to 1."""
        return float(self.shares.max()) * self.label_mass

    def by_name(self, names: Sequence[str]) -> dict[str, float]:
        return dict(zip(names, self.shares.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class DecisionReads:
    """The reads of a request, in the order of its rows.

    Args:
        reads: at least one for each question.
        prompt_tokens: of all reads' prompts, each counted as a whole.
        label_tokens: tokens of labels among the request's items.
        calibration: turns log-probabilities into shares.
    """

    reads: tuple[Read, ...]
    prompt_tokens: int
    label_tokens: int
    calibration: Calibration

    def answers(self, result: ScoreResult) -> list[ReadAnswer]:
        """Return the answer to each question."""
        answers: dict[int, list[ReadAnswer]] = {}
        for read, sums in zip(self.reads, self.label_logprobs(result), strict=True):
            answers.setdefault(read.question, []).append(self._answer(read, sums, result))
        return [_mean(answers[number]) for number in sorted(answers)]

    def label_logprobs(self, result: ScoreResult) -> list[Float64Array]:
        """Return the labels' log-probabilities [L] in each read, in the order of its labels."""
        logprobs = label_logprobs(result)
        return [_sums(read, logprobs) for read in self.reads]

    def _answer(self, read: Read, sums: Float64Array, result: ScoreResult) -> ReadAnswer:
        (shares,) = self.calibration.of(read.kind).shares(sums[None])
        mass = min(1.0, float(np.exp(sums[read.trie.counted]).sum()))
        return ReadAnswer(shares[::-1] if read.turned else shares, mass, _says_label(read, result))


def with_labels(
    request: ScoreRequest,
    labels: Sequence[LabelTrie],
    questions: Sequence[tuple[int, Kind, bool]],
    limits: BackendLimits,
    calibration: Calibration,
) -> tuple[ScoreRequest, DecisionReads]:
    """Return a request with the nodes of labels of several tokens below its items.

    Args:
        request: one item for each read; its labels are the first tokens.
        labels: of each read.
        questions: of each read the question's number, its type, and whether its options are turned.
        limits: a family that would not fit a batch becomes whole prompts instead.
        calibration: for the answers.
    """
    reads, row = [], 0
    for trie, (question, kind, turned) in zip(labels, questions, strict=True):
        reads.append(Read(question, kind, trie, row, turned))
        row += trie.num_rows
    nodes = sum(trie.num_nodes for trie in labels)
    made = with_families(request, labels, limits)
    return made, DecisionReads(tuple(reads), request.num_prompt_tokens, nodes, calibration)


def _sums(read: Read, logprobs: Sequence[Float64Array]) -> Float64Array:
    """Return the log-probabilities [L] of a read's labels; `logprobs` belong to rows' tokens."""
    rows = slice(read.row, read.row + read.trie.num_rows)
    (sums,) = read.trie.sums(np.concatenate(logprobs[rows])[None])
    logprobs_of_labels: Float64Array = sums
    return logprobs_of_labels


def _says_label(read: Read, result: ScoreResult) -> bool | None:
    """Return True if the most probable tokens, one after the other, are a label."""
    if result.top_ids is None:
        return None
    trie, number = read.trie, 0
    while True:
        token = int(result.top_ids[read.row + number, 0])
        if token not in trie.next_ids[number]:
            return False
        below = np.flatnonzero((trie.parents == number - 1) & (trie.tokens == token))
        if not len(below):
            return True
        number = int(below[0]) + 1


def _mean(answers: Sequence[ReadAnswer]) -> ReadAnswer:
    if len(answers) == 1:
        return answers[0]
    known = [answer.argmax_is_label for answer in answers]
    return ReadAnswer(
        np.mean([answer.shares for answer in answers], axis=0),
        float(np.mean([answer.label_mass for answer in answers])),
        None if None in known else all(known),
    )
