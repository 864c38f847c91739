"""The results of the clients' methods: `Scorer`'s results with fields that only a server knows."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuscore.types.batch import Float64Array
from gpuscore.types.results import Classification, PairScores, Ranking, Scores


@dataclass(frozen=True, kw_only=True)
class FromServer:
    """The fields of all results of a server. It has no slots, because a class inherits slots from
    one base only.

    Attributes:
        model: the name that the server answered with.
        request_ids: one per HTTP request.
    """

    model: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoreResponse(FromServer, Scores):
    """`Scores` of a server; `logits` is None."""


@dataclass(frozen=True, slots=True)
class RerankResponse(FromServer, Ranking):
    """A `Ranking` of a server."""


@dataclass(frozen=True, slots=True)
class PairsResponse(FromServer, PairScores):
    """`PairScores` of a server."""


@dataclass(frozen=True, slots=True)
class ClassifyResponse(FromServer, Classification):
    """A `Classification` of a server."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, or the token after it, with log-probabilities.

    Attributes:
        text: the prompt, with `echo`, and the most probable next token, with `max_tokens=1`.
        tokens: [n], the text of each token; empty unless `logprobs` was asked for.
        logprobs: [n], natural logarithms over the whole vocabulary; NaN for a prompt's first token.
        best: [n], with `logprobs` over 0: each token and the most probable tokens, by text; None
            for a prompt's first token.
    """

    text: str
    tokens: tuple[str, ...]  # [n]
    logprobs: Float64Array  # [n]
    best: tuple[Mapping[str, float] | None, ...]  # [n]


@dataclass(frozen=True, slots=True)
class CompletionsResponse(FromServer):
    """Completions of prompts, in the given order.

    Attributes:
        completions: one per prompt.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were not computed again.
    """

    completions: tuple[Completion, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Model:
    """A served model.

    Attributes:
        id: the name for requests.
        max_model_len: the longest prompt, in tokens; None while the model loads.
    """

    id: str
    max_model_len: int | None
