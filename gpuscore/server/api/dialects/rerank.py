"""The wire of /rerank: Cohere's, Jina's, vLLM's and Infinity's bodies, and TEI's where it has
`texts`. One answer holds what each of their clients reads.

`null` means a field's default. What a client sends by habit and is of no meaning here is accepted
at values that change nothing, and refused by name at others.
"""

from functools import partial
from time import time
from typing import Annotated, Any

import msgspec
import numpy as np

from gpuscore.errors import InvalidRequest
from gpuscore.prompts.documents import RerankInput
from gpuscore.server.api.dialects.dialect import Dialect
from gpuscore.server.api.dialects.ranking import Ranking, answer_ranking
from gpuscore.server.api.fields import (
    AnsweredModel,
    AnswerId,
    CacheSalt,
    Created,
    Index,
    Instruction,
    ModelName,
    MostTokens,
    Priority,
    RawFlag,
    Truncate,
    Truncated,
    Unused,
    about,
    refused,
)
from gpuscore.server.api.paths import INFINITY_RERANK_PATH, JINA_RERANK_PATH, RERANK_PATHS
from gpuscore.server.api.schema import ShortUsage, check_not_negative, decoding_errors
from gpuscore.server.observe.record import RequestRecord
from gpuscore.server.service import RequestContext, ScoringService

DOCUMENTS_OF_A_SEARCH = 100  # Cohere's unit of billing, which its clients show


class RerankBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /rerank, /v1/rerank and /v2/rerank."""

    query: Annotated[str, about("What the documents are ranked by.")]
    documents: Annotated[
        list[str | dict[str, Any]] | None,
        about(
            "Texts, or objects with a `text` field (see `rank_fields`). Give either this or "
            "`texts`."
        ),
    ] = None
    texts: Annotated[
        list[str] | None, about("TEI's name of `documents`; the answer is TEI's list, too.")
    ] = None
    model: ModelName = None
    top_n: Annotated[
        int | None,
        about("How many of the best documents to return; 0 and more than there are mean all.", 0),
    ] = None
    top_k: Annotated[int | None, about("Another name of `top_n`, which goes first.", 0)] = None
    return_documents: Annotated[RawFlag, about("Returns documents as they were sent.", False)] = (
        None
    )
    return_text: Annotated[RawFlag, about("TEI's name of `return_documents`.", False)] = None
    raw_scores: Annotated[
        RawFlag, about("Raw scores instead of relevances from 0 to 1.", False)
    ] = None
    instruction: Instruction = None
    rank_fields: Annotated[
        list[str] | None,
        about("Of documents that are objects: the fields to rank by, as lines `name: value`."),
    ] = None
    max_tokens_per_doc: MostTokens = None
    truncate: Truncate = None
    truncation_direction: Annotated[
        str | None, about("`right` in any case of letters; no other.", "right")
    ] = None
    truncation_side: Annotated[str | None, about("`right` only.", "right")] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    user: Unused = None
    # Known, so that they can be refused by name.
    max_chunks_per_doc: Annotated[int | None, refused()] = None
    max_tokens_per_query: Annotated[int | None, refused()] = None
    truncate_prompt_tokens: Annotated[int | None, refused("Use `max_tokens_per_doc`.")] = None
    overlap_tokens: Annotated[int | None, refused()] = None

    @property
    def is_tei(self) -> bool:
        return self.texts is not None and self.documents is None

    @property
    def wants_raw(self) -> bool:
        return _flag(self.raw_scores, "raw_scores")

    @property
    def wants_documents(self) -> bool:
        return _flag(self.return_documents, "return_documents") or _flag(
            self.return_text, "return_text"
        )


class RankedDocument(msgspec.Struct, omit_defaults=True):
    index: Index
    relevance_score: Annotated[float, about("From 0 to 1, or the raw score if asked for.")]
    document: Annotated[
        dict[str, Any] | str | None,
        about('The document, if asked for: an object, a text as `{"text": ...}`.'),
    ] = None
    truncated: Truncated = False


class RerankAnswer(msgspec.Struct):
    """Answer to `documents`."""

    id: AnswerId
    object: Annotated[str, about("`rerank`; `list` at /v1/rerank, as Jina's clients expect.")]
    created: Created
    model: AnsweredModel
    results: Annotated[
        list[RankedDocument], about("Best first; equal scores keep the request's order.")
    ]
    usage: ShortUsage
    meta: Annotated[
        dict[str, Any],
        about("Cohere's metadata: version, units, tokens, and warnings of truncated documents."),
    ]


class RankedText(msgspec.Struct, omit_defaults=True):
    """One of TEI's answer to `texts`, best first."""

    index: Index
    score: Annotated[float, about("From 0 to 1, or the raw score if asked for.")]
    text: Annotated[str | None, about("The document, if asked for.")] = None
    truncated: Truncated = False


_decoder = msgspec.json.Decoder(RerankBody)


def decode_rerank(body: bytes, record: RequestRecord) -> RerankBody:
    """Raises InvalidRequest whose message never holds the body's text."""
    record.tei = b'"texts"' in body  # in a text its quotes would be escaped
    with decoding_errors():
        decoded = _decoder.decode(body)
    record.tei = decoded.is_tei
    return decoded


def to_rerank_input(body: RerankBody) -> RerankInput:
    """Raises InvalidRequest for fields that do not go together or are not supported."""
    if (body.documents is None) == (body.texts is None):
        raise InvalidRequest("either documents or texts is required", param="documents")
    for field in _UNSUPPORTED:
        if getattr(body, field) is not None:
            raise InvalidRequest(f"{field} is not supported by this server", param=field)
    if (
        body.truncation_side not in (None, "right")
        or (body.truncation_direction or "right").lower() != "right"
    ):
        raise InvalidRequest("documents are cut at their end only", param="truncation_direction")
    check_not_negative(body, "top_n", "top_k", "max_tokens_per_doc")
    return RerankInput(
        query=body.query,
        documents=texts_of(body),
        instruction=body.instruction,
        most_tokens=body.max_tokens_per_doc or None,
        fit=_flag(body.truncate, "truncate"),
        priority=body.priority or 0,
        name="texts" if body.is_tei else "documents",
    )


_UNSUPPORTED = (
    "max_chunks_per_doc",
    "max_tokens_per_query",
    "truncate_prompt_tokens",
    "overlap_tokens",
)


def texts_of(body: RerankBody) -> list[str]:
    """The documents as text; of objects their `text`, or what `rank_fields` names, as YAML-like
    lines, which is what Cohere does with them."""
    if body.texts is not None:
        return body.texts
    return [
        document if isinstance(document, str) else _object_text(document, body.rank_fields, index)
        for index, document in enumerate(body.documents or ())
    ]


def _object_text(document: dict[str, Any], fields: list[str] | None, index: int) -> str:
    param = f"documents[{index}]"
    names = fields if fields else ["text"]
    values = [document.get(name) for name in names]
    if not all(isinstance(value, str) for value in values):
        wanted = "the text field" if names == ["text"] else "every field of rank_fields"
        raise InvalidRequest(f"{param} must have {wanted}, as text", param=param)
    if names == ["text"]:
        return str(values[0])
    return "\n".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))


def encode_ranking(body: RerankBody, path: str, ranking: Ranking) -> bytes:
    """The answer, best first, equal ones in the order in which they came.

    Infinity's clients want documents as text, and "rerank" as the object's kind; Jina says "list".
    """
    order = np.argsort(-ranking.scores, kind="stable")
    most = body.top_n or body.top_k or len(order)
    chosen = order[:most].tolist()
    scores = ranking.scores.tolist()
    cut = set(ranking.truncated)
    if body.is_tei:
        texts = texts_of(body) if body.wants_documents else [None] * len(order)
        return msgspec.json.encode([RankedText(i, scores[i], texts[i], i in cut) for i in chosen])
    shown = texts_of(body).__getitem__ if path == INFINITY_RERANK_PATH else partial(_shown, body)
    results = [
        RankedDocument(i, scores[i], shown(i) if body.wants_documents else None, i in cut)
        for i in chosen
    ]
    tokens = ranking.prompt_tokens
    searches = -(-len(order) // DOCUMENTS_OF_A_SEARCH)
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": searches},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
        "warnings": [f"{len(cut)} documents were truncated"] if cut else [],
    }
    usage = ShortUsage(tokens, tokens)
    kind = "list" if path == JINA_RERANK_PATH else "rerank"
    answer = RerankAnswer(
        ranking.request_id, kind, int(time()), ranking.model, results, usage, meta
    )
    return msgspec.json.encode(answer)


def _shown(body: RerankBody, index: int) -> dict[str, Any]:
    document = (body.documents or ())[index]
    return {"text": document} if isinstance(document, str) else document


def _flag(value: bool | str | None, field: str) -> bool:
    """A boolean; some clients send it as text."""
    if isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise InvalidRequest(f"{field} must be true or false", param=field)
        return value.lower() == "true"
    return bool(value)


async def answer_rerank(service: ScoringService, body: RerankBody, call: RequestContext) -> bytes:
    """Raises GpuscoreError as `answer_ranking`."""
    encode = partial(encode_ranking, body, call.path)
    return await answer_ranking(service, to_rerank_input(body), body, call, encode)


RERANK = Dialect(
    paths=(*RERANK_PATHS, INFINITY_RERANK_PATH),
    summary="Rank documents",
    description="Documents by how relevant they are to a query, in the model's own prompt.",
    bodies=(RerankBody,),
    answers=(RerankAnswer, list[RankedText]),
    decode=decode_rerank,
    answer=answer_rerank,
    example={
        "query": "a blue wooden chair for the garden",
        "documents": ["A red steel lamp.", "A wooden garden chair in blue."],
    },
)
