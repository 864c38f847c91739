"""vLLM's requests at /v1/score: pairs of texts, each scored with the model's own prompt."""

from collections.abc import Iterator
from heapq import merge
from operator import itemgetter
from typing import Annotated

import msgspec

from gpuscore.config import RequestLimits
from gpuscore.dialects.answers import PairsAnswer, PairScore
from gpuscore.dialects.decoding import accepting, strict_decoder
from gpuscore.dialects.dialect import (
    COUNT_BYTES,
    HOLE,
    NUMBER_BYTES,
    ROWS,
    PreparedBody,
    error_bytes,
    in_pieces,
    list_json,
    nulls,
)
from gpuscore.dialects.ranking import RankingBody, ranking_of
from gpuscore.dialects.wire import about
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.types.record import RequestRecord
from gpuscore.types.results import spread

Texts = str | list[str | None]
# Fields of each side of the pairs. vLLM renamed them twice and accepts all of these names.
FIRST = ("queries", "text_1", "data_1")
SECOND = ("documents", "items", "text_2", "data_2")


@accepting("pooling", "ranking")
class PairsBody(RankingBody):
    """Body of POST /v1/score from vLLM's clients."""

    queries: Annotated[
        Texts | None,
        about(
            "The first side of the pairs: one text for all of the second side, or as many. Give "
            "exactly one of `queries`, `text_1` and `data_1`."
        ),
    ] = None
    documents: Annotated[
        Texts | None,
        about(
            "The second side of the pairs. Give exactly one of `documents`, `items`, `text_2` and "
            "`data_2`."
        ),
    ] = None
    items: Annotated[Texts | None, about("Another name of `documents`.")] = None
    text_1: Annotated[Texts | None, about("Another name of `queries`.")] = None
    text_2: Annotated[Texts | None, about("Another name of `documents`.")] = None
    data_1: Annotated[Texts | None, about("Another name of `queries`.")] = None
    data_2: Annotated[Texts | None, about("Another name of `documents`.")] = None

    def refused(self) -> Iterator[tuple[int, InvalidRequest]]:
        sides = [_side(self, SECOND), _side(self, FIRST)]
        given = (nulls(texts, name) for name, texts in sides if not isinstance(texts, str))
        return merge(*given, key=itemgetter(0))


class _Keys(msgspec.Struct):
    """Tells which fields of the first side a body has, whatever their values are."""

    queries: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


# Bytes of a pair in the answer: names of fields and the flag `truncated`; an index; a score.
_PAIR_BYTES = 64 + COUNT_BYTES + NUMBER_BYTES
_keys_decoder = msgspec.json.Decoder(_Keys)
_decode_fields = strict_decoder(PairsBody)


def are_pairs(body: bytes) -> bool:
    """Return True if a body has vLLM's name of the first side, which SGLang's never has."""
    try:
        keys = _keys_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return any(getattr(keys, name) is not msgspec.UNSET for name in FIRST)


def decode_pairs(body: bytes, record: RequestRecord, limits: RequestLimits | None) -> PairsBody:
    """Decode a body, and read its pairs as queries and documents for the model's prompt.

    Raises:
        InvalidRequest: fields exclude each other or are not supported. The message never quotes the
            body.
    """
    fields = _decode_fields(body, record, limits)
    query_name, queries = _side(fields, FIRST)
    document_name, documents = _side(fields, SECOND)
    fields.check_truncation()
    texts: list[str | None] = [documents] if isinstance(documents, str) else documents
    if isinstance(queries, list) and len(queries) == 1 < len(texts) and queries[0] is not None:
        queries = queries[0]
    inputs = RerankInput(
        query=queries if isinstance(queries, str) else [text or "" for text in queries],
        documents=[text or "" for text in texts],
        instruction=fields.instruction,
        most_tokens=fields.max_tokens_per_doc or None,
        fit=fields.truncate_prompt_tokens == -1,
        terms=fields.terms,
        name=document_name,
        query_name=query_name,
    )
    fields.read_as(inputs)
    return fields


def _side(body: PairsBody, names: tuple[str, ...]) -> tuple[str, Texts]:
    """Return the name and the value of the only field among `names` that the body has."""
    sides = [(name, getattr(body, name)) for name in names if getattr(body, name) is not None]
    if len(sides) != 1:
        raise InvalidRequest(f"exactly one of {', '.join(names)} is required", param=names[0])
    return sides[0]


def pairs_bytes(prepared: PreparedBody[PairsBody]) -> int:
    """Return about how many bytes the answer has."""
    return _PAIR_BYTES * prepared.body.num_items + error_bytes(prepared.errors)


def encode_pairs(prepared: PreparedBody[PairsBody]) -> Iterator[bytes]:
    ranking = ranking_of(prepared)
    scores = spread(ranking.scores.tolist(), prepared.errors or (), prepared.body.num_items)
    truncated = set(ranking.truncated)
    answer = PairsAnswer(*prepared.head("list"), HOLE, prepared.short_usage, prepared.failed_items)
    rows = (PairScore(i, "score", score, i in truncated) for i, score in enumerate(scores))
    return in_pieces(answer, list_json(rows, ROWS))
