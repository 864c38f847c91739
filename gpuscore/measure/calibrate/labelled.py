"""Labelled questions: JSON lines whose rows are bodies of /v1/systemone with the right answers, and
a model's log-probabilities for them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from gpuscore.dialects.system_one import (
    NamedChoiceQuestion,
    NoulQuestion,
    ScoreQuestion,
    SystemOneBody,
    SystemOneQuestion,
    check_body,
    decision_input,
)
from gpuscore.dialects.wire import about, decoding_errors
from gpuscore.errors import ConfigError, GpuscoreError, InvalidRequest
from gpuscore.measure.calibrate.samples import ReadSample, Samples
from gpuscore.measure.progress import Counted
from gpuscore.offline.calls import Call
from gpuscore.offline.scorer import LoadedScorer
from gpuscore.prompts.calibration import KINDS, Kind
from gpuscore.prompts.decision_reads import Read
from gpuscore.prompts.decisions import DecisionPrompts, DecisionRequest
from gpuscore.types.batch import Float64Array
from gpuscore.types.request import ScoreResult

MOST_SHOWN = 10  # bad rows in an error
Found = list[tuple[Read, Float64Array]]  # the reads of a row, and their labels' log-probabilities


class LabelledRow(SystemOneBody, forbid_unknown_fields=True, kw_only=True):
    """A body of /v1/systemone, and the right answers by the questions' names."""

    answers: Annotated[dict[str, bool | int | str], about("By the questions' names.")]


@dataclass(frozen=True, slots=True)
class LabelledBody:
    """A row, and of each question the number of the label that answers it.

    Args:
        number: of the line, from 1.
    """

    number: int
    body: LabelledRow
    right: tuple[int, ...]


_decoder = msgspec.json.Decoder(LabelledRow)


def read_rows(path: Path) -> list[LabelledBody]:
    """Return the rows of a file.

    Raises:
        ConfigError: the file cannot be read.
        InvalidRequest: rows are not labelled questions; the message has their numbers.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"--data {path}: {error.strerror}") from error
    rows, bad = list[LabelledBody](), list[str]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(number, line))
        except InvalidRequest as error:
            bad.append(f"row {number}: {error.message}")
    _refuse_bad(path, bad)
    if not rows:
        raise InvalidRequest(f"--data {path} has no rows")
    return rows


def _refuse_bad(path: Path, bad: list[str]) -> None:
    """Raise InvalidRequest with the first complaints, if there are any."""
    if bad:
        more = f"\n... and {len(bad) - MOST_SHOWN} more" if len(bad) > MOST_SHOWN else ""
        told = "\n".join(bad[:MOST_SHOWN])
        raise InvalidRequest(f"--data {path}: bad rows: {len(bad)}\n{told}{more}")


def _row(number: int, line: bytes) -> LabelledBody:
    with decoding_errors(LabelledRow):
        body = _decoder.decode(line)
    check_body(body)
    if set(body.answers) != set(body.questions):
        raise InvalidRequest("answers must have the names of questions, all and no others")
    right = [
        _place(question, body.answers[name], f"answers[{place}]")
        for place, (name, question) in enumerate(body.questions.items())
    ]
    return LabelledBody(number, body, tuple(right))


def _place(question: SystemOneQuestion, answer: bool | int | str, param: str) -> int:
    """Return the number of the label that an answer names."""
    if isinstance(question, NoulQuestion):
        if not isinstance(answer, bool):
            raise InvalidRequest(f"{param} must be true or false", param=param)
        return 0 if answer else 1
    if isinstance(question, NamedChoiceQuestion):
        if answer not in question.criteria or not isinstance(answer, str):
            raise InvalidRequest(f"{param} must be a name of the criteria", param=param)
        return list(question.criteria).index(answer)
    assert isinstance(question, ScoreQuestion)  # noqa: S101  (`check_body` refuses boxes)
    count = len(question.criteria)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < count:
        raise InvalidRequest(f"{param} must be a number from 0 to {count - 1}", param=param)
    return answer


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
        reads_of_rows = self._many(calls)
        questions = 0
        for row, reads in zip(rows, reads_of_rows, strict=True):
            for question, logprobs in reads:
                right, asked = row.right[question.question], questions + question.question
                gathered[question.kind].append(
                    (logprobs, right, asked, row.number, question.turned)
                )
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
        _refuse_bad(path, bad)


def _made(prompts: DecisionPrompts, row: LabelledBody) -> DecisionRequest:
    return prompts.build(decision_input(row.body, prompts.limits))


def _call(made: DecisionRequest) -> Call[Found]:
    def finish(result: ScoreResult | None) -> Found:
        assert result is not None  # noqa: S101  (there is a question)
        return list(zip(made.reads.reads, made.reads.label_logprobs(result), strict=True))

    return Call(made.request, finish)
