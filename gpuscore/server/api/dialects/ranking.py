"""The steps shared by the dialects that rank documents in the prompt of the model's family."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from gpuscore.arrays import Float64Array
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.documents import FamilyPrompts, RerankInput
from gpuscore.server.api.dialects.dialect import PreparedBody, Scored
from gpuscore.server.service import LoadedModel
from gpuscore.text.turns import Turns

NO_RERANKER = (
    "this model belongs to no known family of rerankers: start the server with --family, or use "
    "/v1/score with query, items and labels"
)


class RankingFields(Protocol):
    """The fields that the bodies of all these dialects have."""

    @property
    def model(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def wants_raw(self) -> bool: ...


FieldsT = TypeVar("FieldsT", bound=RankingFields)


@dataclass(frozen=True, slots=True)
class CheckedRanking(Generic[FieldsT]):
    """A checked body, and its query and documents for the prompt family."""

    fields: FieldsT
    given: RerankInput

    @property
    def model(self) -> str | None:
        return self.fields.model

    @property
    def num_items(self) -> int:
        return len(self.given.documents)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Scores of a request's documents, in the order of the request.

    Args:
        scores: float64 [documents]: relevance from 0 to 1, or raw scores if those were asked for.
        truncated: numbers of the documents that were cut.
    """

    scores: Float64Array
    truncated: tuple[int, ...]


def prepare_ranking(model: LoadedModel, body: CheckedRanking[Any], turns: Turns) -> PreparedBody:
    """Build the engine's request.

    Raises:
        GpuscoreError: the request is invalid, or the model is of no known family of rerankers.
    """
    prompts = _reranker_of(model)
    built = prompts.build(body.given, turns)
    return PreparedBody.of(built.request, body.fields.cache_salt, (prompts, built.truncated))


def ranking_of(scored: Scored[CheckedRanking[Any]]) -> Ranking:
    prompts, truncated = scored.prepared.notes
    raw = prompts.raw_scores(scored.scores)
    wants_raw = scored.body.fields.wants_raw
    return Ranking(raw if wants_raw else prompts.family.relevance(raw), truncated)


def _reranker_of(model: LoadedModel) -> FamilyPrompts:
    """Return the model's prompts; raise InvalidRequest unless its family is known and ranks."""
    if model.family is None:
        raise InvalidRequest(NO_RERANKER)
    if not model.family.family.ranks:
        raise InvalidRequest(
            f"{model.family.family.name} is a guard and ranks nothing: use /v1/classify"
        )
    return model.family
