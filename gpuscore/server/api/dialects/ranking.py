"""What dialects that judge documents by the model's own prompt have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gpuscore.arrays import Float64Array
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.documents import FamilyPrompts, RerankInput
from gpuscore.server.observe.record import RESPOND, TOKENIZE
from gpuscore.server.service import (
    SMALL_ITEMS,
    LoadedModel,
    RequestContext,
    ScoringService,
    cached_tokens,
)

NO_RERANKER = (
    "this model is of no known family of rerankers, so its prompt is not known; start the server "
    "with --family, or use /v1/score with query, items and labels"
)


class RerankerBody(Protocol):
    """What the bodies of all such dialects say."""

    @property
    def model(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def wants_raw(self) -> bool: ...


def reranker_of(model: LoadedModel) -> FamilyPrompts:
    """The model's prompts; raises InvalidRequest where nothing says that it ranks documents."""
    if model.family is None:
        raise InvalidRequest(NO_RERANKER)
    if not model.family.family.ranks:
        raise InvalidRequest(
            f"{model.family.family.name} is a guard and ranks nothing: use /v1/classify"
        )
    return model.family


@dataclass(frozen=True, slots=True)
class Ranking:
    """What is known of a request's documents, in their order."""

    model: str  # as the caller calls it
    request_id: str
    scores: Float64Array
    truncated: tuple[int, ...]
    prompt_tokens: int


async def answer_ranking(
    service: ScoringService,
    given: RerankInput,
    body: RerankerBody,
    call: RequestContext,
    encode: Callable[[Ranking], bytes],
) -> bytes:
    """Raises GpuscoreError, also where the model is of no known family of rerankers."""
    name = service.model_name(body.model)
    model = service.loaded()
    prompts, record = reranker_of(model), call.record
    record.items = len(given.documents)
    with record.stage(TOKENIZE):
        built = await service.in_turns(call, partial(prompts.build, given))
    result = await service.run(model, built.request, body.cache_salt, call)
    with record.stage(RESPOND):
        record.prompt_tokens = built.request.num_prompt_tokens
        record.cached_tokens = cached_tokens(built.request, result)
        raw = prompts.raw_scores(result)
        scores = raw if body.wants_raw else prompts.family.relevance(raw)
        ranking = Ranking(name, record.request_id, scores, built.truncated, record.prompt_tokens)
        small = len(given.documents) <= SMALL_ITEMS
        if small:
            return encode(ranking)
        return await service.in_thread(call, partial(encode, ranking))
