"""The steps shared by the dialects that rank documents in the prompt of the model's family."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from gpuscore.arrays import Float64Array
from gpuscore.prompts.documents import RerankInput
from gpuscore.server.api.dialects.dialect import PreparedBody, Scored
from gpuscore.server.served import LoadedModel
from gpuscore.text.turns import Turns


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
class DocumentScores:
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
    prompts = model.prompts.reranker
    built = prompts.build(body.given, turns)
    return PreparedBody.of(built.request, body.fields.cache_salt, (prompts, built.truncated))


def ranking_of(scored: Scored[CheckedRanking[Any]]) -> DocumentScores:
    prompts, truncated = scored.prepared.notes
    raw = prompts.raw_scores(scored.scores)
    wants_raw = scored.body.fields.wants_raw
    return DocumentScores(raw if wants_raw else prompts.family.relevance(raw), truncated)
