"""Answers of all dialects, as structs that servers write and clients read."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from gpuscore.dialects.wire import FailedItems, ShortUsage, TokenUsage, about

AnsweredModel = Annotated[str, about("The model's name as the request gave it, or else its own.")]
Index = Annotated[int, about("Number of the document in the request, from 0.")]
Truncated = Annotated[bool, about("true if it was cut, as the request allowed.")]
LabelMass = Annotated[float | None, about("The probability of all labels together, if asked for.")]


class AnswerHead(msgspec.Struct, omit_defaults=True):
    """The fields that answers of several routes begin with."""

    id: Annotated[str, about("The request's id, as in the header X-Request-Id.")]
    object: Annotated[str, about("The kind of answer, as clients of the route expect it.")]
    created: Annotated[int, about("Time of the answer, in seconds since 1970.")]
    model: AnsweredModel


class ScoreAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/score."""

    scores: Annotated[
        list[list[float | list[float]] | None],
        about(
            "A row per item and a number per label, in the request's order; null for an item in "
            "`errors`. With `score_extraction_token` a list of rows per item; so are "
            "`label_logprobs`, and `label_mass` is a list of numbers."
        ),
    ]
    model: AnsweredModel
    usage: TokenUsage
    object: Annotated[str, about("Always `scoring`.")]
    label_logprobs: Annotated[
        list[list[float | list[float]] | None] | None,
        about("Natural logarithms of the labels' probabilities over the whole vocabulary."),
    ] = None
    label_mass: Annotated[
        list[float | list[float] | None] | None,
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
    prompt_token_id_logprobs: Annotated[
        list[list[float]] | UnsetType,
        about(
            "With `prompt_logprob_token_ids`: for each row from `prompt_logprob_start` on, the "
            "natural logarithms of its tokens' probabilities, in the order of the request."
        ),
    ] = UNSET


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
