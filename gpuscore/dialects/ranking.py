"""Routes that rank documents for a query: the steps that they share. Prompts are the family's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, TypeVar

import numpy as np

from gpuscore.dialects.decoding import check_not_negative
from gpuscore.dialects.dialect import ItemsBody, PreparedBody
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import about
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.types.batch import Float64Array


class RankingBody(ItemsBody, kw_only=True):
    """The fields that the bodies of these routes share."""

    input: ClassVar[RerankInput]
    instruction: Annotated[
        str | None,
        about("Replaces the family's own instruction; refused where the family has none."),
    ] = None
    max_tokens_per_doc: Annotated[
        int | None,
        about("Cuts longer documents at their end, to this many tokens; 0 means never.", 0),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        about(
            "-1: cuts documents at their end where their prompts would not fit the model. Other "
            "values are refused; use `max_tokens_per_doc`."
        ),
    ] = None
    use_activation: Annotated[
        bool | None, about("false: raw scores instead of probabilities.", True)
    ] = None
    softmax: Annotated[bool | None, about("Older name of `use_activation`.", True)] = None
    activation: Annotated[bool | None, about("Older name of `use_activation`.", True)] = None

    @property
    def num_items(self) -> int:
        return len(self.input.documents)

    @property
    def wants_raw(self) -> bool:
        """True for raw scores in place of relevances."""
        return False in (self.use_activation, self.activation, self.softmax)

    def check_truncation(self) -> None:
        """Raise InvalidRequest if a limit of tokens per document is invalid."""
        check_not_negative(self, "max_tokens_per_doc")
        if self.truncate_prompt_tokens not in (None, -1):
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1, for the model's limit; max_tokens_per_doc sets "
                "a lower one",
                param="truncate_prompt_tokens",
            )


RankingT = TypeVar("RankingT", bound=RankingBody)


@dataclass(frozen=True, slots=True)
class DocumentScores:
    """Scores of a request's documents, in the order of the request.

    Args:
        scores: float64 [scored]: relevance from 0 to 1, or raw scores if they were asked for.
        places: number of each scored document in the request; others have errors.
        truncated: numbers of the documents that were cut.
    """

    scores: Float64Array
    places: Sequence[int]
    truncated: tuple[int, ...]


def prepare_ranking(
    model: LoadedModel, body: RankingT, truncate: bool = False
) -> PreparedBody[RankingT]:
    """Build the engine's request. With `truncate`, documents are cut to fit the model.

    Raises:
        GpuscoreError: the request is invalid, or the model is of no known family of rerankers.
    """
    prompts = model.prompts.reranker
    given = replace(body.input, fit=True) if truncate else body.input
    errors = body.errors(model, body.input.name, body.num_items)
    built = prompts.build(given, errors)
    return PreparedBody.of(body, built.request, (prompts, built.truncated), errors)


def ranking_of(prepared: PreparedBody[RankingT]) -> DocumentScores:
    prompts, truncated = prepared.notes
    places = prepared.scored_places
    if not places:
        return DocumentScores(np.empty(0), places, truncated)
    raw = prompts.raw_scores(prepared.scores)
    scores = raw if prepared.body.wants_raw else prompts.family.relevance(raw)
    return DocumentScores(scores, places, truncated)
