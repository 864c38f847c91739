"""The dialect of /v1/systemone: System One's typed questions about one state."""

import time
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from gpuscore.config import RequestLimits
from gpuscore.dialects.answers import (
    Diagnostics,
    NamedChoiceAnswer,
    NoulAnswer,
    ScoreLevelAnswer,
    SystemOneAnswer,
    SystemOneUsage,
)
from gpuscore.dialects.decisions import prepared_decisions
from gpuscore.dialects.dialect import (
    COUNT_BYTES,
    HOLE,
    NUMBER_BYTES,
    QUESTIONS,
    ROWS,
    Dialect,
    PreparedBody,
    Scored,
    in_pieces,
    object_json,
    text_bytes,
    value_bytes,
)
from gpuscore.dialects.paths import SYSTEM_ONE_PATH
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import (
    ErrorAnswer,
    PromptTokensDetails,
    ScoringBody,
    about,
    error_body,
    refused,
    strict_decoder,
)
from gpuscore.errors import GpuscoreError, InvalidRequest
from gpuscore.prompts.decision_reads import DecisionReads, ReadAnswer
from gpuscore.prompts.decision_texts import (
    Content,
    DecisionQuestion,
    check_questions,
    choice_question,
    json_text,
    noul_question,
    score_question,
)
from gpuscore.prompts.decisions import DecisionInput
from gpuscore.text.boundaries import Turns

Instructions = Annotated[
    Content | None, about("The question: text, or JSON that the model reads as text.")
]
Described = Annotated[Content | None, about("Describes the answer to the model.")]


class NoulCriteria(msgspec.Struct, forbid_unknown_fields=True):
    """Descriptions of the answers yes and no."""

    true: Described = None
    false: Described = None


class NoulQuestion(msgspec.Struct, tag="noul", forbid_unknown_fields=True):
    """A question or statement that is answered by yes or no."""

    instructions: Instructions = None
    criteria: Annotated[
        NoulCriteria | None, about("Needed, with a description, if there are no instructions.")
    ] = None


class NamedChoiceQuestion(msgspec.Struct, tag="choice", forbid_unknown_fields=True):
    """A choice between named options."""

    criteria: Annotated[
        dict[str, Content | None],
        about("1 to 255 options (`--max-options`): names, with descriptions or null."),
    ]
    instructions: Instructions = None


class ScoreQuestion(msgspec.Struct, tag="score", forbid_unknown_fields=True):
    """A rating by a level on a scale."""

    criteria: Annotated[
        list[Content],
        about("1 to 26 levels (`--max-levels`), lowest first; the first counts as 0."),
    ]
    instructions: Instructions = None


class BoxQuestion(msgspec.Struct, tag="box", forbid_unknown_fields=True):
    """A place in an image; refused, because this server reads no images."""

    instructions: Instructions = None


SystemOneQuestion = NoulQuestion | NamedChoiceQuestion | ScoreQuestion | BoxQuestion


class SystemOneBody(ScoringBody):
    """Body of POST /v1/systemone. `null` means a field's default."""

    state: Annotated[Any, about("What the questions are about: text, or any JSON but null.")]
    questions: Annotated[
        dict[str, SystemOneQuestion],
        about("1 to 1024 questions (`--max-questions`), by names of the caller's choice."),
    ]
    instructions: Annotated[
        str | None, about("For the model, before the state, in a turn of the system.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("Variables of the model's chat template.")
    ] = None
    assets: Annotated[dict[str, Any] | None, refused("This server reads no images.")] = None

    @property
    def num_items(self) -> int:
        return len(self.questions)


def check_body(decoded: SystemOneBody) -> None:
    """Raise InvalidRequest for fields that this server does not read, and for a null state."""
    if decoded.assets is not None:
        raise InvalidRequest("assets: this server reads no images", param="assets")
    if decoded.state is None:
        raise InvalidRequest("state must not be null", param="state")
    for number, question in enumerate(decoded.questions.values()):
        if isinstance(question, BoxQuestion):
            raise InvalidRequest(
                f"questions[{number}]: box asks for a place in an image, and this server reads no "
                "images",
                param=f"questions[{number}]",
            )


def prepare_system_one(model: LoadedModel, body: SystemOneBody, turns: Turns) -> PreparedBody:
    """Build the engine's request.

    Raises:
        GpuscoreError: the request is invalid, or the model cannot answer such questions.
    """
    prompts = model.prompts.questions
    made = prompts.build(decision_input(body, prompts.limits), turns)
    return prepared_decisions(made, body.cache_salt)


def decision_input(body: SystemOneBody, limits: RequestLimits) -> DecisionInput:
    """Return a body's questions; raise InvalidRequest for a question that cannot be asked."""
    check_questions(len(body.questions), limits.max_questions)
    questions = [
        _asked(question, limits, f"questions[{number}]")
        for number, question in enumerate(body.questions.values())
    ]
    return DecisionInput(
        input=body.state if isinstance(body.state, str) else json_text(body.state),
        questions=questions,
        instructions=body.instructions,
        chat=body.chat_template_kwargs or {},
        is_json=not isinstance(body.state, str),
        priority=body.priority or 0,
        need_top=True,
        input_name="state",
    )


def _asked(question: SystemOneQuestion, limits: RequestLimits, param: str) -> DecisionQuestion:
    instructions = question.instructions
    if isinstance(question, NamedChoiceQuestion):
        return choice_question(instructions, question.criteria, limits, param)
    if isinstance(question, NoulQuestion):
        told = question.criteria or NoulCriteria()
        return noul_question(instructions, told.true, told.false, param)
    assert not isinstance(question, BoxQuestion)  # noqa: S101  (`decode` refuses it)
    return score_question(instructions, question.criteria, limits, param)


def system_one_bytes(body: SystemOneBody, prepared: PreparedBody) -> int:
    diagnostics = 64 + NUMBER_BYTES
    return sum(
        2 * text_bytes(name) + diagnostics + _question_bytes(question)
        for name, question in body.questions.items()
    )


def _question_bytes(question: SystemOneQuestion) -> int:
    """Return the most bytes of a question's answer, which shows its best option twice."""
    size = 128 + 3 * NUMBER_BYTES
    if isinstance(question, NamedChoiceQuestion):
        names = [*question.criteria]
        longest = max(map(text_bytes, names), default=0)
        return size + longest + NUMBER_BYTES * len(names) + text_bytes(*names)
    if isinstance(question, ScoreQuestion):
        levels = (COUNT_BYTES + NUMBER_BYTES) * 2 * len(question.criteria)
        return size + levels + sum(map(value_bytes, question.criteria))
    return size


def encode_system_one(scored: Scored[SystemOneBody]) -> Iterator[bytes]:
    reads: DecisionReads = scored.prepared.notes
    by_name = dict(zip(scored.body.questions, reads.answers(scored.scores), strict=True))
    answer = SystemOneAnswer(
        scored.request_id,
        int(time.time()),
        scored.model,
        HOLE,
        SystemOneUsage(scored.prompt_tokens, PromptTokensDetails(scored.cached_tokens)),
        HOLE,
    )
    questions = scored.body.questions
    answers = ((name, _answer(question, by_name[name])) for name, question in questions.items())
    diagnostics = (
        (name, Diagnostics(read.label_mass, read.argmax_is_label)) for name, read in by_name.items()
    )
    return in_pieces(answer, object_json(answers, QUESTIONS), object_json(diagnostics, ROWS))


def _answer(
    question: SystemOneQuestion, read: ReadAnswer
) -> NoulAnswer | NamedChoiceAnswer | ScoreLevelAnswer:
    if isinstance(question, NamedChoiceQuestion):
        names = list(question.criteria)
        return NamedChoiceAnswer(names[read.best], read.by_name(names), read.confidence)
    if isinstance(question, ScoreQuestion):
        legend = {str(number): level for number, level in enumerate(question.criteria)}
        named = read.by_name(list(legend))
        return ScoreLevelAnswer(read.mean, legend, named, read.confidence)
    return NoulAnswer(float(read.shares[0]), read.confidence)


def encode_system_one_error(error: GpuscoreError, variant: str = "") -> bytes:
    """Return an error as JSON, with its message also where some clients look for it."""
    told = error.message
    return msgspec.json.encode(ErrorAnswer(error_body(error), detail=told, message=told))


SYSTEM_ONE = Dialect(
    paths=(SYSTEM_ONE_PATH,),
    summary="System One: typed questions over one state",
    description="Yes or no, one of several options, or a level, with probabilities.",
    bodies=(SystemOneBody,),
    answers=(SystemOneAnswer,),
    decode=strict_decoder(SystemOneBody, check_body),
    prepare=prepare_system_one,
    encode=encode_system_one,
    answer_bytes=system_one_bytes,
    encode_error=encode_system_one_error,
    example={
        "state": {"query": "a red bedroom lamp", "item": "Small crimson lantern made of steel."},
        "questions": {
            "fits": {"type": "noul", "instructions": "Does the item fit the query?"},
            "colour": {"type": "choice", "criteria": {"red": None, "blue": "navy or azure"}},
            "size": {"type": "score", "criteria": ["small", "medium", "large"]},
        },
    },
)
