"""Bodies of /v1/decisions."""

from typing import Annotated, Any

import msgspec

from gpuscore.dialects.wire import (
    CacheSalt,
    ModelName,
    Priority,
    Unused,
    about,
    refused,
)

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
