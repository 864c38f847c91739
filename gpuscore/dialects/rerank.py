"""The dialect of /rerank: bodies of Cohere, Jina, vLLM and Infinity, and of TEI.

A body with `texts` is TEI's. All others get the same answer, with the fields that any of their
clients reads. `null` means a field's default. Some fields of these APIs have no meaning here: they
are accepted at values that change nothing; others are refused with an error that names the field.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from gpuscore.config import RequestLimits
from gpuscore.dialects.answers import RankedDocument, RankedText, RerankAnswer, TeiError
from gpuscore.dialects.decoding import accepting, check_not_negative, strict_decoder
from gpuscore.dialects.dialect import (
    COUNT_BYTES,
    HOLE,
    NUMBER_BYTES,
    ROWS,
    Dialect,
    PreparedBody,
    error_bytes,
    in_pieces,
    list_json,
    text_bytes,
)
from gpuscore.dialects.paths import (
    INFINITY_RERANK_PATH,
    JINA_RERANK_PATH,
    RERANK_PATHS,
    TEXT_RANKING_PATH,
)
from gpuscore.dialects.ranking import RankingBody, prepare_ranking, ranking_of
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import ErrorAnswer, ReturnMass, about, error_body
from gpuscore.errors import GpuscoreError, InvalidRequest
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.types.record import RequestRecord
from gpuscore.types.results import label_mass

Document: TypeAlias = str | dict[str, msgspec.Raw]  # fields are decoded where they are read
RawFlag: TypeAlias = bool | str | None  # some clients send booleans as text
TEXT_FIELD = ["text"]
_text = msgspec.json.Decoder(str)


def _text_of(document: Document | None, names: list[str]) -> str | None:
    """Return a document as text; None if it has none.

    The text of an object is its field `text`, or its `rank_fields` as lines `name: value`, which is
    Cohere's format.
    """
    if not isinstance(document, dict):
        return document
    lines = []
    for name in names:
        try:
            value = _text.decode(document[name])
        except (KeyError, msgspec.ValidationError):
            return None
        lines.append(value if names == TEXT_FIELD else f"{name}: {value}")
    return "\n".join(lines)


def _rank_fields(body: "RerankBody") -> list[str]:
    """Return the fields to rank by; raise InvalidRequest if one is named twice.

    A repeated field would make the documents' texts longer than the body.
    """
    names = body.rank_fields or TEXT_FIELD
    if len(set(names)) < len(names):
        raise InvalidRequest("rank_fields must name each field once", param="rank_fields")
    return names


def _bytes(document: Document | None) -> int:
    """Return the most bytes that a document's names and values take in an answer."""
    if isinstance(document, dict):
        return sum(text_bytes(name) + len(memoryview(raw)) for name, raw in document.items())
    return text_bytes(document)


DOCUMENTS_OF_A_SEARCH = 100  # Cohere's unit of billing, which its clients show


@accepting("pooling", "ranking", "rerank")
class RerankBody(RankingBody):
    """Body of POST /rerank, /v1/rerank and /v2/rerank."""

    query: Annotated[str, about("The query that the documents are ranked by.")]
    documents: Annotated[
        list[str | dict[str, msgspec.Raw] | None] | None,
        about(
            "Texts, or objects with a `text` field (see `rank_fields`). Give either this or "
            "`texts`. null is a document that cannot be scored: see `on_error`."
        ),
    ] = None
    texts: Annotated[
        list[str] | None, about("TEI's name of `documents`; the answer is then TEI's list.")
    ] = None
    top_n: Annotated[
        int | None,
        about("Number of best documents to return; 0, or more than there are, returns all.", 0),
    ] = None
    top_k: Annotated[int | None, about("Used instead of `top_n` if that is null or 0.", 0)] = None
    return_documents: Annotated[RawFlag, about("Returns documents as they were sent.", False)] = (
        None
    )
    return_text: Annotated[RawFlag, about("TEI's name of `return_documents`.", False)] = None
    raw_scores: Annotated[
        RawFlag, about("Raw scores instead of relevances from 0 to 1.", False)
    ] = None
    return_label_mass: ReturnMass = None
    rank_fields: Annotated[
        list[str] | None,
        about("For documents that are objects: the fields to rank by, as lines `name: value`."),
    ] = None
    truncate: Annotated[
        RawFlag,
        about(
            "Cuts the end of documents whose prompts do not fit the model; if null, the server's "
            "`--rerank-truncate` decides."
        ),
    ] = None
    instruct: Annotated[str | None, about("SGLang's name of `instruction`.")] = None

    def refused(self) -> Iterator[tuple[int, InvalidRequest]]:
        names = _rank_fields(self)
        which = "the text field" if names == TEXT_FIELD else "every field of rank_fields"
        rule = f"must have {which}, as text"
        for index, document in enumerate(self.documents or ()):
            if _text_of(document, names) is None:
                param = f"documents[{index}]"
                what = "is null; it must be a text" if document is None else rule
                yield index, InvalidRequest(f"{param} {what}", param=param)

    @property
    def is_tei(self) -> bool:
        return self.texts is not None and self.documents is None

    @property
    def wants_raw(self) -> bool:
        return _flag(self.raw_scores, "raw_scores") or super().wants_raw

    @property
    def wants_documents(self) -> bool:
        return _flag(self.return_documents, "return_documents") or _flag(
            self.return_text, "return_text"
        )


TEI = "tei"  # the variant of a request whose body is TEI's
# Bytes of one document in an answer: field names, index, score, label mass, `truncated`.
_RANKED_BYTES = 96 + COUNT_BYTES + 2 * NUMBER_BYTES
_TEI_TYPES = {429: "Overloaded", 503: "Unhealthy"}
_decoded = strict_decoder(RerankBody)


def decode_rerank(body: bytes, record: RequestRecord, limits: RequestLimits | None) -> RerankBody:
    """Decode and check a body; raise InvalidRequest, whose message never holds the body's text."""
    # Decoding errors need the variant, too, so it is guessed first; the decoded body decides.
    tei = b'"texts"' in body or record.route == TEXT_RANKING_PATH
    record.variant = TEI if tei else ""
    fields = _decoded(body, record, limits)
    record.variant = TEI if fields.is_tei else ""
    return _checked(fields)


class TextRankingBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /pipeline/text-ranking, from clients of Hugging Face's inference API."""

    inputs: Annotated[msgspec.Raw, about("A body of /rerank with `query` and `texts`.")]


_outer = strict_decoder(TextRankingBody)


def decode_text_ranking(
    body: bytes, record: RequestRecord, limits: RequestLimits | None
) -> RerankBody:
    """Decode and check the body of /rerank that is in `inputs`, as `decode_rerank` does."""
    record.variant = TEI
    return decode_rerank(bytes(_outer(body, record, limits).inputs), record, limits)


def _checked(body: RerankBody) -> RerankBody:
    """Read the body's texts and return it; raise InvalidRequest for fields that exclude each other
    or are not supported."""
    if (body.documents is None) == (body.texts is None):
        raise InvalidRequest("either documents or texts is required", param="documents")
    body.check_truncation()
    if body.instruction is not None and body.instruct is not None:
        raise InvalidRequest("instruction and instruct exclude each other", param="instruct")
    field = "instruct" if body.instruction is None else "instruction"
    if body.is_tei and body.on_error == "null":
        raise InvalidRequest(
            "on_error null needs documents: the answer to texts, TEI's list, cannot hold errors",
            param="on_error",
        )
    check_not_negative(body, "top_n", "top_k")
    names = _rank_fields(body)
    texts = [_text_of(document, names) for document in body.texts or body.documents or ()]
    inputs = RerankInput(
        query=body.query,
        documents=[text or "" for text in texts],
        instruction=getattr(body, field),
        instruction_name=field,
        most_tokens=body.max_tokens_per_doc or None,
        fit=_flag(body.truncate, "truncate") or body.truncate_prompt_tokens == -1,
        terms=body.terms,
        need_lse=bool(body.return_label_mass),
        name="texts" if body.is_tei else "documents",
    )
    body.read_as(inputs)
    return body


def prepare_rerank(model: LoadedModel, body: RerankBody) -> PreparedBody[RerankBody]:
    """Build the engine's request; raise GpuscoreError as `prepare_ranking` does."""
    truncate = model.prompts.builder.limits.rerank_truncate and body.truncate is None
    return prepare_ranking(model, body, truncate)


def rerank_bytes(prepared: PreparedBody[RerankBody]) -> int:
    body = prepared.body
    size = _RANKED_BYTES * body.num_items + error_bytes(prepared.errors)
    if body.wants_documents:
        # Infinity's clients get texts, which may hold the names of `rank_fields`.
        size += sum(map(_bytes, body.documents or ())) + text_bytes(*body.input.documents)
    return size


def encode_rerank(prepared: PreparedBody[RerankBody]) -> Iterator[bytes]:
    """Return the answer as JSON, best first; equal scores keep the order of the request."""
    body = prepared.body
    ranking = ranking_of(prepared)
    order = np.argsort(-ranking.scores, kind="stable")
    best = order[: body.top_n or body.top_k or len(order)].tolist()
    scores = ranking.scores.tolist()
    truncated = set(ranking.truncated)
    with_mass = body.return_label_mass and scores
    masses = [None] * len(scores)
    if with_mass:
        request = prepared.engine_request
        masses = label_mass(prepared.scores, request.label_ids, request.trie).tolist()
    chosen = ((ranking.places[number], scores[number], masses[number]) for number in best)
    document = _document_of(prepared)
    rows = ((i, score, document(i), i in truncated, mass) for i, score, mass in chosen)
    step = 1 if body.wants_documents else ROWS  # a document may be long
    if body.is_tei:
        return list_json((RankedText(*row) for row in rows), step)
    results = list_json((RankedDocument(*row) for row in rows), step)
    head = prepared.head("list" if prepared.record.route == JINA_RERANK_PATH else "rerank")
    usage = prepared.short_usage
    meta = _meta(len(order), prepared.prompt_tokens, len(truncated))
    return in_pieces(
        RerankAnswer(*head, results=HOLE, usage=usage, meta=meta, errors=prepared.failed_items),
        results,
    )


def _document_of(prepared: PreparedBody[RerankBody]) -> Callable[[int], Any]:
    """Return a function from a document's index to what the answer shows of it.

    This is a text for TEI's and Infinity's clients, and an object for all others.
    """
    body = prepared.body
    if not body.wants_documents:
        return lambda index: None
    if body.is_tei or prepared.record.route == INFINITY_RERANK_PATH:
        return prepared.body.input.documents.__getitem__
    given = body.documents or ()
    return lambda i: {"text": given[i]} if isinstance(given[i], str) else given[i]


def _meta(documents: int, tokens: int, truncated: int) -> dict[str, Any]:
    """Return Cohere's metadata."""
    return {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": -(-documents // DOCUMENTS_OF_A_SEARCH)},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
        "warnings": [f"{truncated} documents were truncated"] if truncated else [],
    }


def _flag(value: RawFlag, field: str) -> bool:
    """Return a field as a boolean; some clients send it as text."""
    if isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise InvalidRequest(f"{field} must be true or false", param=field)
        return value.lower() == "true"
    return bool(value)


def encode_rerank_error(error: GpuscoreError, variant: str) -> bytes:
    """Return an error in TEI's format, or for other clients in this server's, with `detail`."""
    if variant == TEI:
        kind = _TEI_TYPES.get(error.status, "Validation" if error.status < 500 else "Backend")
        return msgspec.json.encode(TeiError(error.message, kind))
    detail = error.code if error.param is None else f"{error.code}: {error.param}"
    return msgspec.json.encode(ErrorAnswer(error_body(error), detail))


RERANK = Dialect(
    paths=(*RERANK_PATHS, INFINITY_RERANK_PATH),
    summary="Rank documents",
    description="Documents ordered by their relevance to a query, in the model's own prompt.",
    bodies=(RerankBody,),
    answers=(RerankAnswer, list[RankedText]),
    decode=decode_rerank,
    prepare=prepare_rerank,
    encode=encode_rerank,
    answer_bytes=rerank_bytes,
    errors=(ErrorAnswer, TeiError),
    encode_error=encode_rerank_error,
    example={
        "query": "a blue wooden chair for the garden",
        "documents": ["A red steel lamp.", "A wooden garden chair in blue."],
    },
)
TEXT_RANKING = replace(
    RERANK,
    paths=(TEXT_RANKING_PATH,),
    bodies=(TextRankingBody,),
    answers=(list[RankedText],),
    decode=decode_text_ranking,
    example={"inputs": {"query": "a blue lamp", "texts": ["A red chair.", "A lamp in blue."]}},
)
