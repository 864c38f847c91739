"""The steps shared by the dialects that rank documents in the prompt of the model's family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from gpuscore.dialects.dialect import PreparedBody, Scored
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import Instruction, ItemsBody, MostTokens
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.boundaries import Turns
from gpuscore.types.batch import Float64Array
from gpuscore.types.results import ItemErrors, scored_places


class RankingBody(ItemsBody, kw_only=True):
    """The fields of the bodies of all these dialects."""

    instruction: Instruction = None
    max_tokens_per_doc: MostTokens = None

    @property
    def wants_raw(self) -> bool:
        """True for raw scores in place of relevances."""
        raise NotImplementedError


FieldsT = TypeVar("FieldsT", bound=ItemsBody)
InputT = TypeVar("InputT")


@dataclass(frozen=True, slots=True)
class CheckedItems(Generic[FieldsT, InputT]):
    """A checked body, and its texts for the engine's request.

    Args:
        fields: the body.
        input: the texts, with an empty one in the place of each that cannot be read.
        refused: the errors of texts that cannot be read; the request fails if there are any, unless
            the body has `on_error: null`.

    Raises:
        InvalidRequest: the first of these errors, if it fails the request.
    """

    fields: FieldsT
    input: InputT
    refused: ItemErrors

    def __post_init__(self) -> None:
        if self.fields.on_error != "null":
            self.refused.raise_first()

    @property
    def model(self) -> str | None:
        return self.fields.model


class CheckedRanking(CheckedItems[FieldsT, RerankInput]):
    """A checked body, and its query and documents for the prompt family."""

    @property
    def num_items(self) -> int:
        return len(self.input.documents)


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


def present_texts(texts: Sequence[str | None], name: str, refused: ItemErrors) -> list[str]:
    """Return texts, with an empty one in the place of each null, which gets an error."""
    for index, text in enumerate(texts):
        if text is None:
            param = f"{name}[{index}]"
            refused.add(index, InvalidRequest(f"{param} is null; it must be a text", param=param))
    return [text or "" for text in texts]


def prepare_ranking(model: LoadedModel, body: CheckedRanking[Any], turns: Turns) -> PreparedBody:
    """Build the engine's request.

    Raises:
        GpuscoreError: the request is invalid, or the model is of no known family of rerankers.
    """
    prompts, salt = model.prompts.reranker, body.fields.cache_salt
    if body.fields.on_error != "null":
        built = prompts.build(body.input, turns)
        return PreparedBody.of(built.request, salt, (prompts, built.truncated))
    errors = body.refused.copy()
    rest = prompts.build_rest(body.input, errors, turns)
    request, truncated = (None, ()) if rest is None else (rest.request, rest.truncated)
    return PreparedBody.of(request, salt, (prompts, truncated), errors.listed())


def ranking_of(scored: Scored[CheckedRanking[Any]]) -> DocumentScores:
    prompts, truncated = scored.prepared.notes
    places = scored_places(scored.errors, scored.body.num_items)
    if not places:
        return DocumentScores(np.empty(0), places, truncated)
    raw = prompts.raw_scores(scored.scores)
    scores = raw if scored.body.fields.wants_raw else prompts.family.relevance(raw)
    return DocumentScores(scores, places, truncated)
