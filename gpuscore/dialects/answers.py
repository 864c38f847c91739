"""Answers of all dialects, as structs that servers write and clients read."""

from typing import Annotated, Any, Literal

import msgspec

from gpuscore.dialects.wire import (
    AnsweredModel,
    AnswerId,
    Created,
    FailedItems,
    Index,
    PromptTokens,
    PromptTokensDetails,
    ShortUsage,
    TokenUsage,
    TotalTokens,
    Truncated,
    about,
)
from gpuscore.prompts.decision_texts import Content


class AnswerHead(msgspec.Struct, omit_defaults=True):
    """The fields that answers of several routes begin with."""

    id: AnswerId
    object: Annotated[str, about("The kind of answer, as clients of the route expect it.")]
    created: Created
    model: AnsweredModel


class ScoreAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/score."""

    scores: Annotated[
        list[list[float] | None],
        about(
            "A row per item and a number per label, in the request's order; null for an item in "
            "`errors`."
        ),
    ]
    model: AnsweredModel
    usage: TokenUsage
    object: Annotated[str, about("Always `scoring`.")]
    label_logprobs: Annotated[
        list[list[float] | None] | None,
        about("Natural logarithms of the labels' probabilities over the whole vocabulary."),
    ] = None
    label_mass: Annotated[
        list[float | None] | None,
        about(
            "Per item, the probability of all its labels together. A label that continues another "
            "one does not count, because its probability is part of the other's."
        ),
    ] = None
    errors: FailedItems = None


class PairScore(msgspec.Struct, omit_defaults=True):
    index: Annotated[int, about("Number of the pair in the request, from 0.")]
    object: Annotated[str, about("Always `score`.")]
    score: Annotated[
        float | None,
        about("Relevance of the pair, or its raw score; null for a pair in `errors`."),
    ]
    truncated: Truncated = False


class PairsAnswer(AnswerHead):
    """Answer of POST /v1/score to a body of pairs; its object is `list`."""

    data: Annotated[list[PairScore], about("One per pair, in the request's order.")]
    usage: ShortUsage
    errors: FailedItems = None


LabelMass = Annotated[float | None, about("The probability of all labels together, if asked for.")]


class RankedDocument(msgspec.Struct, omit_defaults=True):
    index: Index
    relevance_score: Annotated[float, about("From 0 to 1, or the raw score if asked for.")]
    document: Annotated[
        dict[str, Any] | str | None,
        about('The document, if asked for: an object, a text as `{"text": ...}`.'),
    ] = None
    truncated: Truncated = False
    label_mass: LabelMass = None


class RerankAnswer(AnswerHead):
    """Answer to `documents`; its object is `rerank`, at /v1/rerank `list`."""

    results: Annotated[
        list[RankedDocument],
        about("Best first; equal scores keep the request's order. Those in `errors` are left out."),
    ]
    usage: ShortUsage
    meta: Annotated[
        dict[str, Any],
        about("Cohere's metadata: version, units, tokens, and warnings of truncated documents."),
    ]
    errors: FailedItems = None


class RankedText(msgspec.Struct, omit_defaults=True):
    """A document in TEI's answer to `texts`, which lists the best first."""

    index: Index
    score: Annotated[float, about("From 0 to 1, or the raw score if asked for.")]
    text: Annotated[str | None, about("The document, if asked for.")] = None
    truncated: Truncated = False
    label_mass: LabelMass = None


class TeiError(msgspec.Struct):
    """TEI's error, for a body with `texts`."""

    error: str
    error_type: str


class ClassifiedText(msgspec.Struct, omit_defaults=True):
    """One text's classes."""

    index: Annotated[int, about("Number of the text in the request, from 0.")]
    label: Annotated[str, about("The most probable class.")]
    probs: Annotated[list[float], about("One per class, in the order of the answer's `labels`.")]
    num_classes: Annotated[int, about("Number of classes.")]
    label_mass: LabelMass = None
    truncated: Truncated = False


class ClassifyAnswer(AnswerHead):
    """Answer of POST /v1/classify and /classify; its object is `list`."""

    labels: Annotated[list[str], about("Names of the classes.")]
    data: Annotated[list[ClassifiedText], about("One per text, in the request's order.")]
    usage: ShortUsage


class Logprobs(msgspec.Struct):
    tokens: Annotated[list[str], about("The text of each token.")]
    token_logprobs: Annotated[
        list[float | None], about("Natural logarithms; null for a prompt's first token.")
    ]
    top_logprobs: Annotated[
        list[dict[str, float] | None] | None,
        about("With `logprobs` over 0: each token and the most probable ones in its place."),
    ]
    text_offset: Annotated[list[int], about("Characters before each token.")]


class CompletionChoice(msgspec.Struct):
    index: Annotated[int, about("Number of the prompt in the request, from 0.")]
    text: Annotated[str, about("The prompt, with `echo`, and the next token, with `max_tokens` 1.")]
    logprobs: Annotated[Logprobs | None, about("If asked for.")]
    finish_reason: Annotated[str, about("Always `length`.")] = "length"


class CompletionAnswer(AnswerHead):
    """Answer of POST /v1/completions; its object is `text_completion`."""

    choices: Annotated[list[CompletionChoice], about("One per prompt, in the request's order.")]
    usage: TokenUsage


class TokenizeAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of POST /tokenize."""

    count: Annotated[int, about("Number of tokens.")]
    max_model_len: Annotated[int, about("The longest prompt that the model takes, in tokens.")]
    tokens: Annotated[list[int], about("Token ids.")]
    token_strs: Annotated[
        list[str | None] | None,
        about("The vocabulary's entry of each id, if asked for; null where it has none."),
    ] = None


class DetokenizeAnswer(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: Annotated[str, about("The text of the tokens, special tokens included.")]


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


MAX_QUESTIONS = 400  # of /v1/decisions: OpenAI's limit


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


OverallConfidence = Annotated[
    float, about("The most probable answer's probability, over the whole vocabulary.")
]
Shares = Annotated[dict[str, float], about("The answers' probabilities, which sum to 1.")]


class NoulAnswer(msgspec.Struct, tag="noul"):
    noul: Annotated[float, about("Probability of yes, among yes and no.")]
    confidence: OverallConfidence


class NamedChoiceAnswer(msgspec.Struct, tag="choice"):
    choice: Annotated[str, about("Name of the most probable option.")]
    probabilities: Shares
    confidence: OverallConfidence


class ScoreLevelAnswer(msgspec.Struct, tag="score"):
    score: Annotated[float, about("The mean of the levels' numbers, by their probabilities.")]
    legend: Annotated[dict[str, Content], about('The levels, by number: "0", "1" and so on.')]
    probabilities: Shares
    confidence: OverallConfidence


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
