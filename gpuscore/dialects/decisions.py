"""The dialect of /v1/decisions: OpenAI's typed questions about one shared input."""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from gpuscore.config import RequestLimits
from gpuscore.dialects.answers import (
    MAX_QUESTIONS,
    ChoiceAnswer,
    DecisionsAnswer,
    DecisionsUsage,
    InputDetails,
    LevelAnswer,
    LevelShare,
    OptionShare,
    PredicateAnswer,
)
from gpuscore.dialects.dialect import (
    HOLE,
    NUMBER_BYTES,
    QUESTIONS,
    Dialect,
    PreparedBody,
    Scored,
    in_pieces,
    list_json,
    text_bytes,
)
from gpuscore.dialects.paths import DECISIONS_PATH
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import (
    ScoringBody,
    Unused,
    about,
    refused,
    strict_decoder,
)
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.decision_reads import DecisionReads, ReadAnswer
from gpuscore.prompts.decision_texts import (
    DecisionQuestion,
    check_count,
    check_questions,
    choice,
    level,
    most_options,
    predicate,
)
from gpuscore.prompts.decisions import DecisionInput, DecisionRequest
from gpuscore.text.boundaries import Turns


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of an input or of instructions."""

    type: Annotated[str, about("`input_text`, `output_text`, `refusal` or `input_json`.")]
    text: Annotated[str | None, about("For `input_text` and `output_text`.")] = None
    refusal: Annotated[str | None, about("For `refusal`.")] = None
    data: Annotated[Any, about("For `input_json`: any JSON, which the model reads as text.")] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, about("Accepted and ignored.")] = None
    # Fields of pictures are known, so that the error can name them.
    image_url: Annotated[str | None, refused("This server reads no pictures.")] = None
    file_id: Annotated[str | None, refused("This server reads no files.")] = None
    detail: Annotated[str | None, refused("This server reads no pictures.")] = None


Content = str | list[ContentPart]


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message, a tool call, or a tool's output."""

    type: Annotated[
        str,
        about(
            "`message`, `function_call`, `custom_tool_call`, `function_call_output` or "
            "`custom_tool_call_output`."
        ),
    ] = "message"
    role: Annotated[str | None, about("For a message: the speaker.")] = None
    content: Annotated[Content | None, about("For a message: its text.")] = None
    phase: Unused = None
    id: Unused = None
    status: Unused = None
    call_id: Unused = None
    namespace: Unused = None
    name: Annotated[str | None, about("For a tool call: the tool's name.")] = None
    arguments: Annotated[str | None, about("For `function_call`.")] = None
    input: Annotated[str | None, about("For `custom_tool_call`.")] = None
    output: Annotated[Content | None, about("For a tool's output: the output.")] = None


QuestionName = Annotated[str | None, about("Returned with the answer.")]
Description = Annotated[str | None, about("Explains it to the model.", "")]


class PredicateQuestion(msgspec.Struct, tag="predicate", forbid_unknown_fields=True):
    """A yes-or-no question: is a statement true?"""

    instructions: Annotated[Content, about("The statement.")]
    name: QuestionName = None


class ChoiceOption(msgspec.Struct, forbid_unknown_fields=True):
    value: Annotated[str | bool, about("Returned if it is chosen; each value must be unique.")]
    description: Description = None


class ChoiceQuestion(msgspec.Struct, tag="choice", forbid_unknown_fields=True):
    """A choice between several values."""

    instructions: Annotated[Content, about("The question.")]
    choices: Annotated[list[ChoiceOption], about("2 to 255 values (`--max-options`).")]
    name: QuestionName = None


class Level(msgspec.Struct, forbid_unknown_fields=True):
    label: Annotated[str, about("Name of the level.")]
    description: Description = None


class LevelQuestion(msgspec.Struct, tag="score", forbid_unknown_fields=True):
    """A question that is answered by a level on a scale."""

    instructions: Annotated[Content, about("The question.")]
    levels: Annotated[
        list[Level],
        about("2 to 26 levels (`--max-levels`), lowest first; the first counts as 0."),
    ]
    name: QuestionName = None


Question = PredicateQuestion | ChoiceQuestion | LevelQuestion


class DecisionsBody(ScoringBody):
    """Body of POST /v1/decisions. `null` means a field's default."""

    input: Annotated[
        str | list[InputItem], about("The text or conversation that the questions are about.")
    ]
    questions: Annotated[list[Question], about(f"1 to {MAX_QUESTIONS} questions.")]
    # Prefixes are always cached, and users are not recorded.
    prompt_cache_key: Unused = None
    prompt_cache_options: Annotated[dict[str, Any] | None, about("Accepted and ignored.")] = None
    safety_identifier: Unused = None
    user: Unused = None

    @property
    def num_items(self) -> int:
        return len(self.questions)


def prepare_decisions(model: LoadedModel, body: DecisionsBody, turns: Turns) -> PreparedBody:
    """Build the engine's request.

    Raises:
        GpuscoreError: the request is invalid, or the model cannot answer such questions.
    """
    prompts = model.prompts.questions
    questions = [
        _asked(question, prompts.limits, f"questions[{number}]")
        for number, question in enumerate(body.questions)
    ]
    decisions = DecisionInput(_input_text(body.input), questions, priority=body.priority or 0)
    return prepared_decisions(prompts.build(decisions, turns), body.cache_salt)


def prepared_decisions(made: DecisionRequest, salt: str | None) -> PreparedBody:
    """Return the body of typed questions, whose notes are the reads of its request."""
    reads = made.reads
    return PreparedBody(
        made.request, salt, reads.prompt_tokens, reads, label_tokens=reads.label_tokens
    )


def _asked(question: Question, limits: RequestLimits, param: str) -> DecisionQuestion:
    instructions = _text(question.instructions, f"{param}.instructions")
    if isinstance(question, PredicateQuestion):
        return predicate(instructions)
    if isinstance(question, ChoiceQuestion):
        most = most_options(limits.max_options)
        check_count(len(question.choices), 2, most, "choices", param)
        values = [(type(option.value), option.value) for option in question.choices]
        if len(set(values)) < len(values):
            raise InvalidRequest(f"{param}.choices has a value twice", param=f"{param}.choices")
        options = [(_shown(o.value), o.description or "") for o in question.choices]
        return choice(instructions, options)
    check_count(len(question.levels), 2, most_options(limits.max_levels), "levels", param)
    return level(
        instructions, [(entry.label, entry.description or "") for entry in question.levels]
    )


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _input_text(input: str | list[InputItem]) -> str:
    """Return the input as text: a text or a single user message as it is, a conversation with a
    paragraph for each turn."""
    if isinstance(input, str):
        return input
    if not input:
        raise InvalidRequest("input must hold at least one item", param="input")
    turns = [_turn(item, f"input[{index}]") for index, item in enumerate(input)]
    if len(turns) == 1 and turns[0][0] == "user":
        return turns[0][1]
    return "\n\n".join(f"{who}: {text}" for who, text in turns)


def _turn(item: InputItem, param: str) -> tuple[str, str]:
    """Return the speaker of a turn and the text."""
    if item.type == "message" and item.role is not None and item.content is not None:
        return item.role, _text(item.content, f"{param}.content")
    if item.type in ("function_call", "custom_tool_call") and item.name is not None:
        return "tool call", f"{item.name}({item.arguments or item.input or ''})"
    if item.type in ("function_call_output", "custom_tool_call_output"):
        return "tool", _text(item.output or "", f"{param}.output")
    raise InvalidRequest(f"{param} is not a known kind of message or tool call", param=param)


def _text(content: Content, param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, param: str) -> str:
    if part.type in ("input_text", "output_text") and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type == "input_json":
        return msgspec.json.encode(part.data).decode()
    raise InvalidRequest(f"{param} must be text or JSON", param=param)


def decisions_bytes(body: DecisionsBody, prepared: PreparedBody) -> int:
    return sum(map(_question_bytes, body.questions))


def _question_bytes(question: Question) -> int:
    """Return the most bytes of a question's answer, which shows its best option twice."""
    shown = [""]
    if isinstance(question, ChoiceQuestion):
        shown = [_shown(option.value) for option in question.choices]
    elif not isinstance(question, PredicateQuestion):
        shown = [level.label for level in question.levels]
    name = text_bytes(question.name, max(shown, key=len))
    return 128 + name + (64 + 2 * NUMBER_BYTES) * (len(shown) + 1) + text_bytes(*shown)


def encode_decisions(scored: Scored[DecisionsBody]) -> Iterator[bytes]:
    reads: DecisionReads = scored.prepared.notes
    read = reads.answers(scored.scores)
    answers = (_answer(*pair) for pair in zip(scored.body.questions, read, strict=True))
    tokens = scored.prompt_tokens
    usage = DecisionsUsage(tokens, InputDetails(scored.cached_tokens), tokens)
    return in_pieces(DecisionsAnswer(scored.model, HOLE, usage), list_json(answers, QUESTIONS))


def _answer(question: Question, read: ReadAnswer) -> PredicateAnswer | ChoiceAnswer | LevelAnswer:
    """Return a question's answer; its confidence is the largest share."""
    shares, mass, best = read.shares.tolist(), read.label_mass, read.best
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(question.name, shares[0], mass)
    if isinstance(question, ChoiceQuestion):
        options = [
            OptionShare(option.value, share)
            for option, share in zip(question.choices, shares, strict=True)
        ]
        return ChoiceAnswer(question.name, options[best].value, shares[best], options, mass)
    levels = [
        LevelShare(entry.label, value, share)
        for value, (entry, share) in enumerate(zip(question.levels, shares, strict=True))
    ]
    return LevelAnswer(question.name, read.mean, shares[best], levels, mass)


DECISIONS = Dialect(
    paths=(DECISIONS_PATH,),
    summary="Typed questions over one input",
    description="Yes or no, one of several choices, or a level, with probabilities.",
    bodies=(DecisionsBody,),
    answers=(DecisionsAnswer,),
    decode=strict_decoder(
        DecisionsBody, lambda body: check_questions(len(body.questions), MAX_QUESTIONS)
    ),
    prepare=prepare_decisions,
    encode=encode_decisions,
    answer_bytes=decisions_bytes,
    example={
        "input": "Small crimson lantern made of steel.",
        "questions": [
            {"type": "predicate", "instructions": "It is a red lamp."},
            {
                "type": "choice",
                "instructions": "What is it made of?",
                "choices": [{"value": "wood"}, {"value": "metal"}],
            },
        ],
    },
)
