"""The answer of /v1/completions."""

from typing import Annotated

import msgspec

from gpuscore.dialects.fields import AnsweredModel, AnswerId, Created, about
from gpuscore.dialects.schema import TokenUsage


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


class CompletionAnswer(msgspec.Struct):
    """Answer of POST /v1/completions."""

    id: AnswerId
    object: Annotated[str, about("Always `text_completion`.")]
    created: Created
    model: AnsweredModel
    choices: Annotated[list[CompletionChoice], about("One per prompt, in the request's order.")]
    usage: TokenUsage
