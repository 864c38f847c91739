"""What dialects that judge documents by the model's own prompt have in common."""

from functools import partial

from gpuscore.errors import InvalidRequest
from gpuscore.families.prompts import FamilyPrompts, Rerank, RerankInput
from gpuscore.server.record import TOKENIZE
from gpuscore.server.service import Call, LoadedModel, ScoringService, cached_tokens
from gpuscore.types import Float64Array

NO_RERANKER = (
    "this model is of no known family of rerankers, so its prompt is not known; start the server "
    "with --family, or use /v1/score with query, items and labels"
)


def reranker_of(model: LoadedModel) -> FamilyPrompts:
    """The model's prompts; raises InvalidRequest where nothing says that it ranks documents."""
    if model.family is None:
        raise InvalidRequest(NO_RERANKER)
    if not model.family.family.ranks:
        raise InvalidRequest(
            f"{model.family.family.name} is a guard and ranks nothing: use /v1/classify"
        )
    return model.family


async def ranked(
    service: ScoringService,
    model: LoadedModel,
    prompts: FamilyPrompts,
    given: RerankInput,
    salt: str | None,
    call: Call,
) -> tuple[Rerank, Float64Array]:
    """The request as it was run, and the raw scores of its documents, in their order."""
    call.record.items = len(given.documents)
    with call.record.stage(TOKENIZE):
        built = await service.in_time(partial(prompts.build, given))
    result = await service.run(model, built.request, salt, call)
    call.record.prompt_tokens = built.request.num_prompt_tokens
    call.record.cached_tokens = cached_tokens(built.request, result)
    return built, prompts.raw_scores(result)
