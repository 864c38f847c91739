"""Bodies and answers of /v1/decisions."""

from typing import Annotated, Any

import msgspec

from gpuscore.dialects.fields import (
    AnsweredModel,
    CacheSalt,
    ModelName,
    Priority,
    Unused,
    about,
    refused,
)
from gpuscore.dialects.schema import PromptTokens, TotalTokens

MAX_QUESTIONS = 400  # OpenAI's limit


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


class DecisionsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/decisions. `null` means a field's default."""

    input: Annotated[
        str | list[InputItem], about("The text or conversation that the questions are about.")
    ]
    questions: Annotated[list[Question], about(f"1 to {MAX_QUESTIONS} questions.")]
    model: ModelName = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    # Prefixes are always cached, and users are not recorded.
    prompt_cache_key: Unused = None
    prompt_cache_options: Annotated[dict[str, Any] | None, about("Accepted and ignored.")] = None
    safety_identifier: Unused = None
    user: Unused = None

    @property
    def num_items(self) -> int:
        return len(self.questions)


AnsweredName = Annotated[str | None, about("The question's name.")]
Confidence = Annotated[float, about("The largest of the probabilities.")]
Mass = Annotated[
    float,
    about(
        "The probability of all labels together; near 0 means that the model would have said "
        "something else."
    ),
]
Probability = Annotated[float, about("Its probability among the question's labels.")]
Zero = Annotated[int, about("Always 0.")]


class PredicateAnswer(msgspec.Struct, tag="predicate"):
    name: AnsweredName
    probability: Annotated[float, about("Probability that the statement is true.")]
    label_mass: Mass


class OptionShare(msgspec.Struct):
    value: Annotated[str | bool, about("As in the question.")]
    probability: Probability


class ChoiceAnswer(msgspec.Struct, tag="choice"):
    name: AnsweredName
    choice: Annotated[str | bool, about("The most probable value.")]
    confidence: Confidence
    probabilities: Annotated[list[OptionShare], about("One per value, in the question's order.")]
    label_mass: Mass


class LevelShare(msgspec.Struct):
    label: Annotated[str, about("As in the question.")]
    value: Annotated[int, about("Number of the level, from 0.")]
    probability: Probability


class LevelAnswer(msgspec.Struct, tag="score"):
    name: AnsweredName
    score: Annotated[float, about("The mean of the levels' numbers, by their probabilities.")]
    confidence: Confidence
    probabilities: Annotated[list[LevelShare], about("One per level, in the question's order.")]
    label_mass: Mass


class InputDetails(msgspec.Struct):
    cached_tokens: Annotated[int, about("Prompt tokens that no forward pass computed.")]
    cache_write_tokens: Zero = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: Zero = 0


class DecisionsUsage(msgspec.Struct):
    input_tokens: PromptTokens
    input_tokens_details: InputDetails
    total_tokens: TotalTokens
    output_tokens: Zero = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)


class DecisionsAnswer(msgspec.Struct):
    """Answer of POST /v1/decisions."""

    model: AnsweredModel
    answers: Annotated[
        list[PredicateAnswer | ChoiceAnswer | LevelAnswer],
        about("One per question, in the request's order."),
    ]
    usage: DecisionsUsage
