"""The dialect of /v1/ranking: the body and the answer of NVIDIA's NIM for rerankers."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from gpuscore.dialects.answers import NimAnswer, NimRanking
from gpuscore.dialects.dialect import (
    COUNT_BYTES,
    HOLE,
    NUMBER_BYTES,
    ROWS,
    Dialect,
    PreparedBody,
    Scored,
    in_pieces,
    list_json,
)
from gpuscore.dialects.paths import NIM_PATH
from gpuscore.dialects.ranking import CheckedRanking, RankingBody, prepare_ranking, ranking_of
from gpuscore.dialects.wire import about, check_not_negative, refused, strict_decoder
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.types.record import RequestRecord
from gpuscore.types.results import ItemErrors


class NimText(msgspec.Struct, forbid_unknown_fields=True):
    text: Annotated[str, about("The text.")]
    image: Annotated[str | None, refused("This server reads no images.")] = None


class NimBody(RankingBody):
    """Body of POST /v1/ranking."""

    query: Annotated[NimText, about("The query that the passages are ranked by.")]
    passages: Annotated[list[NimText], about("The passages.")]
    truncate: Annotated[
        str | None,
        about("`END` cuts passages at their end where they would not fit; `NONE` refuses.", "NONE"),
    ] = None

    @property
    def wants_raw(self) -> bool:
        return True


_decoded = strict_decoder(NimBody)


def _decode(body: bytes, record: RequestRecord) -> CheckedRanking[NimBody]:
    fields = _decoded(body, record)
    check_not_negative(fields, "max_tokens_per_doc")
    if fields.truncate not in (None, "NONE", "END"):
        raise InvalidRequest("truncate must be NONE or END", param="truncate")
    if fields.on_error == "null":
        raise InvalidRequest("this answer has no place for errors", param="on_error")
    if any(passage.image is not None for passage in (fields.query, *fields.passages)):
        raise InvalidRequest("this server reads no images", param="image")
    rerank_input = RerankInput(
        query=fields.query.text,
        documents=[passage.text for passage in fields.passages],
        instruction=fields.instruction,
        most_tokens=fields.max_tokens_per_doc or None,
        fit=fields.truncate == "END",
        priority=fields.priority or 0,
        need_lse=False,
        name="passages",
    )
    return CheckedRanking(fields, rerank_input, ItemErrors())


def _bytes(body: CheckedRanking[NimBody], prepared: PreparedBody) -> int:
    return body.num_items * (32 + COUNT_BYTES + NUMBER_BYTES)


def _encode(scored: Scored[CheckedRanking[NimBody]]) -> Iterator[bytes]:
    logits = ranking_of(scored).scores
    order = np.argsort(-logits, kind="stable").tolist()
    rows = (NimRanking(index, logits[index].item()) for index in order)
    return in_pieces(NimAnswer(HOLE, scored.short_usage), list_json(rows, ROWS))


NIM = Dialect(
    paths=(NIM_PATH,),
    summary="Rank passages",
    description="Passages ordered by their raw scores, as NVIDIA's NIM answers.",
    bodies=(NimBody,),
    answers=(NimAnswer,),
    decode=_decode,
    prepare=prepare_ranking,
    encode=_encode,
    answer_bytes=_bytes,
    example={
        "query": {"text": "a blue wooden chair for the garden"},
        "passages": [{"text": "A red steel lamp."}, {"text": "A wooden garden chair in blue."}],
    },
)
