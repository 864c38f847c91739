"""Reading labelled questions with the model."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gpuscore.dialects.system_one import decision_input
from gpuscore.errors import GpuscoreError
from gpuscore.measure.calibrate.rows import LabelledBody, refuse_bad
from gpuscore.measure.calibrate.samples import ReadSample, Samples
from gpuscore.measure.progress import Counted
from gpuscore.offline.calls import Call
from gpuscore.offline.loaded import LoadedScorer
from gpuscore.offline.many import AHEAD, in_order
from gpuscore.prompts.calibration import KINDS, Kind
from gpuscore.prompts.decision_reads import Read
from gpuscore.prompts.decisions import DecisionPrompts, DecisionRequest
from gpuscore.types.arrays import Float64Array
from gpuscore.types.request import ScoreResult

Found = list[tuple[Read, Float64Array]]  # the reads of a row, and their labels' log-probabilities


class LabelledScorer(LoadedScorer):
    """A model that reads labelled questions."""

    def samples(
        self, path: Path, rows: Sequence[LabelledBody], read: Counted
    ) -> dict[Kind, Samples]:
        """Return the samples of each type that the rows have.

        Args:
            path: of the rows' file, for errors.
            rows: of the file.
            read: called after each row.

        Raises:
            InvalidRequest: the model cannot answer questions, or rows cannot be asked; the message
                has their numbers.
        """
        prompts = self._prompts.questions
        self._check(path, rows, prompts)
        calls = (_call(_made(prompts, row)) for row in rows)
        gathered = defaultdict[Kind, list[ReadSample]](list)
        found = in_order(calls, self._engine.score, AHEAD * self._backend.limits.max_tokens)
        questions = 0
        for row, reads in zip(rows, found, strict=True):
            for one, logprobs in reads:
                right, asked = row.right[one.question], questions + one.question
                gathered[one.kind].append((logprobs, right, asked, row.number, one.turned))
            questions += len(row.right)
            read(1)
        return {kind: Samples.of(gathered[kind]) for kind in KINDS if kind in gathered}

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
