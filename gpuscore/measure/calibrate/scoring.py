"""Reading labelled questions with the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuscore.dialects.system_one import decision_input
from gpuscore.errors import GpuscoreError
from gpuscore.measure.calibrate.rows import LabelledBody, refuse_bad
from gpuscore.measure.calibrate.samples import Samples
from gpuscore.offline.calls import Call
from gpuscore.offline.scorer import LoadedScorer
from gpuscore.prompts.calibration import KINDS, Kind
from gpuscore.prompts.decision_reads import Read
from gpuscore.prompts.decisions import DecisionPrompts, DecisionRequest
from gpuscore.types.arrays import Float64Array
from gpuscore.types.request import ScoreResult

Found = list[tuple[Read, Float64Array]]  # the reads of a row, and their labels' log-probabilities


class LabelledScorer(LoadedScorer):
    """A model that reads labelled questions."""

    def samples(
        self, path: Path, rows: Sequence[LabelledBody], report: Callable[[int], None]
    ) -> dict[Kind, Samples]:
        """Return the samples of each type that the rows have.

        Args:
            path: of the rows' file, for errors.
            rows: of the file.
            report: called with the number of rows read so far.

        Raises:
            InvalidRequest: the model cannot answer questions, or rows cannot be asked; the message
                has their numbers.
        """
        prompts = self._prompts.questions
        self._check(path, rows, prompts)
        calls = (_call(_made(prompts, row)) for row in rows)
        gathered = {kind: _Gathered() for kind in KINDS}
        found = self._many(calls)
        questions = 0
        for number, (row, reads) in enumerate(zip(rows, found, strict=True), start=1):
            for read, logprobs in reads:
                right, asked = row.right[read.question], questions + read.question
                gathered[read.kind].add(read, logprobs, right, asked, row.number)
            questions += len(row.right)
            report(number)
        return {kind: one.samples() for kind, one in gathered.items() if one.logprobs}

    def _check(self, path: Path, rows: Sequence[LabelledBody], prompts: DecisionPrompts) -> None:
        """Raise InvalidRequest with the numbers of rows that cannot be asked, before any is."""
        bad = []
        for row in rows:
            try:
                _made(prompts, row)
            except GpuscoreError as error:
                bad.append(f"row {row.number}: {error.message}")
        refuse_bad(path, bad)


def _made(prompts: DecisionPrompts, row: LabelledBody) -> DecisionRequest:
    return prompts.build(decision_input(row.body, prompts.limits))


def _call(made: DecisionRequest) -> Call[Found]:
    def finish(result: ScoreResult | None) -> Found:
        assert result is not None  # noqa: S101  (there is a question)
        return list(zip(made.reads.reads, made.reads.label_logprobs(result), strict=True))

    return Call(made.request, finish)


@dataclass
class _Gathered:
    """Reads of one type of question, as they come."""

    logprobs: list[Float64Array] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    turned: list[bool] = field(default_factory=list)

    def add(self, read: Read, logprobs: Float64Array, right: int, question: int, row: int) -> None:
        self.logprobs.append(logprobs)
        self.right.append(right)
        self.questions.append(question)
        self.rows.append(row)
        self.turned.append(read.turned)

    def samples(self) -> Samples:
        return Samples.of(self.logprobs, self.right, self.questions, self.rows, self.turned)
