"""Bodies and answers of /v1/systemone."""

from typing import Annotated, Any, Literal

import msgspec

from gpuscore.dialects.fields import (
    AnsweredModel,
    AnswerId,
    CacheSalt,
    Created,
    ModelName,
    Priority,
    about,
    refused,
)
from gpuscore.dialects.schema import PromptTokens, PromptTokensDetails
from gpuscore.prompts.decision_texts import Content

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


class SystemOneBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/systemone. `null` means a field's default."""

    state: Annotated[Any, about("What the questions are about: text, or any JSON but null.")]
    questions: Annotated[
        dict[str, SystemOneQuestion],
        about("1 to 1024 questions (`--max-questions`), by names of the caller's choice."),
    ]
    model: ModelName = None
    instructions: Annotated[
        str | None, about("For the model, before the state, in a turn of the system.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("Variables of the model's chat template.")
    ] = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    assets: Annotated[dict[str, Any] | None, refused("This server reads no images.")] = None

    @property
    def num_items(self) -> int:
        return len(self.questions)


Confidence = Annotated[
    float, about("The most probable answer's probability, over the whole vocabulary.")
]
Shares = Annotated[dict[str, float], about("The answers' probabilities, which sum to 1.")]


class NoulAnswer(msgspec.Struct, tag="noul"):
    noul: Annotated[float, about("Probability of yes, among yes and no.")]
    confidence: Confidence


class NamedChoiceAnswer(msgspec.Struct, tag="choice"):
    choice: Annotated[str, about("Name of the most probable option.")]
    probabilities: Shares
    confidence: Confidence


class ScoreLevelAnswer(msgspec.Struct, tag="score"):
    score: Annotated[float, about("The mean of the levels' numbers, by their probabilities.")]
    legend: Annotated[dict[str, Content], about('The levels, by number: "0", "1" and so on.')]
    probabilities: Shares
    confidence: Confidence


class Diagnostics(msgspec.Struct):
    label_mass: Annotated[
        float,
        about(
            "The probability of all possible answers together, over the whole vocabulary; near 0 "
            "means that the model would have said something else."
        ),
    ]
    argmax_is_label: Annotated[
        bool | None, about("true if what the model would most probably say is one of the answers.")
    ]


class SystemOneUsage(msgspec.Struct):
    input_tokens: PromptTokens
    input_tokens_details: PromptTokensDetails
    output_tokens: Annotated[int, about("Always 0: nothing is generated.")] = 0


class SystemOneAnswer(msgspec.Struct):
    """Answer of POST /v1/systemone."""

    id: AnswerId
    created: Created
    model: AnsweredModel
    answers: Annotated[
        dict[str, NoulAnswer | NamedChoiceAnswer | ScoreLevelAnswer],
        about("One per question, by its name."),
    ]
    usage: SystemOneUsage
    diagnostics: Annotated[dict[str, Diagnostics], about("One per question, by its name.")]
    object: Literal["structured_decision"] = "structured_decision"
