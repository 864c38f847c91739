"""The dialect of /v1/decisions: OpenAI's typed questions about one shared input."""

from collections.abc import Iterator

import msgspec

from gpuscore.config import RequestLimits
from gpuscore.dialects.decision_types import (
    MAX_QUESTIONS,
    ChoiceAnswer,
    ChoiceQuestion,
    Content,
    ContentPart,
    DecisionsAnswer,
    DecisionsBody,
    DecisionsUsage,
    InputDetails,
    InputItem,
    LevelAnswer,
    LevelShare,
    OptionShare,
    PredicateAnswer,
    PredicateQuestion,
    Question,
)
from gpuscore.dialects.dialect import Dialect, PreparedBody, Scored
from gpuscore.dialects.paths import DECISIONS_PATH
from gpuscore.dialects.pieces import (
    HOLE,
    NUMBER_BYTES,
    QUESTIONS,
    in_pieces,
    list_json,
    text_bytes,
)
from gpuscore.dialects.schema import decoding_errors
from gpuscore.dialects.served import LoadedModel
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
from gpuscore.text.turns import Turns
from gpuscore.types.record import RequestRecord

_decoder = msgspec.json.Decoder(DecisionsBody)


def decode_decisions(body: bytes, record: RequestRecord) -> DecisionsBody:
    """Decode and check a body; raise InvalidRequest, whose message never holds the body's text."""
    with decoding_errors(DecisionsBody):
        decoded = _decoder.decode(body)
    check_questions(len(decoded.questions), MAX_QUESTIONS)
    return decoded


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
    given = DecisionInput(_input_text(body.input), questions, priority=body.priority or 0)
    return prepared_decisions(prompts.build(given, turns), body.cache_salt)


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
    return level(instructions, [(one.label, one.description or "") for one in question.levels])


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
    found = reads.answers(scored.scores)
    answers = (_answer(*pair) for pair in zip(scored.body.questions, found, strict=True))
    tokens = scored.prompt_tokens
    usage = DecisionsUsage(tokens, InputDetails(scored.cached_tokens), tokens)
    return in_pieces(DecisionsAnswer(scored.model, HOLE, usage), list_json(answers, QUESTIONS))


def _answer(question: Question, found: ReadAnswer) -> PredicateAnswer | ChoiceAnswer | LevelAnswer:
    """Return a question's answer; its confidence is the largest share."""
    shares, mass, best = found.shares.tolist(), found.label_mass, found.best
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(question.name, shares[0], mass)
    if isinstance(question, ChoiceQuestion):
        options = [
            OptionShare(option.value, share)
            for option, share in zip(question.choices, shares, strict=True)
        ]
        return ChoiceAnswer(question.name, options[best].value, shares[best], options, mass)
    levels = [
        LevelShare(one.label, value, share)
        for value, (one, share) in enumerate(zip(question.levels, shares, strict=True))
    ]
    mean = sum(one.value * one.probability for one in levels)
    return LevelAnswer(question.name, mean, shares[best], levels, mass)


DECISIONS = Dialect(
    paths=(DECISIONS_PATH,),
    summary="Typed questions over one input",
    description="Yes or no, one of several choices, or a level, with probabilities.",
    bodies=(DecisionsBody,),
    answers=(DecisionsAnswer,),
    decode=decode_decisions,
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
