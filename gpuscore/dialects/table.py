"""The table of all dialects, by path, and the answers to requests that a route refuses.

Routes that generate text or make embeddings on other servers are answered 400, not 404, so that the
message can say why.
"""

from typing import Annotated, Any, NoReturn

import msgspec

from gpuscore.dialects.classify import CLASSIFY
from gpuscore.dialects.completions import COMPLETIONS
from gpuscore.dialects.dialect import Dialect
from gpuscore.dialects.paths import GENERATING_PATHS
from gpuscore.dialects.rerank import RERANK, TEXT_RANKING
from gpuscore.dialects.score import SCORE
from gpuscore.dialects.tokens import DETOKENIZE, TOKENIZE_TEXT
from gpuscore.dialects.wire import SCORES_ONLY, about, encode_error
from gpuscore.errors import GpuscoreError, InvalidRequest
from gpuscore.types.record import RequestRecord


class RefusedBody(msgspec.Struct):
    """Body of a route that always answers 400."""

    model: Annotated[str | None, about("Not read.")] = None

    @property
    def num_items(self) -> None:
        return None


def _refuse(*_: object) -> RefusedBody:
    raise InvalidRequest(
        f"{SCORES_ONLY}, embeddings included: see /v1/score, /v1/rerank, and /v1/completions for "
        "the log-probabilities of a prompt"
    )


def _never(*_: object) -> NoReturn:
    raise AssertionError("the body was refused")


GENERATING = Dialect(
    paths=GENERATING_PATHS,
    summary="Generation and embeddings",
    description="Always 400: this server scores only; it does not generate or embed.",
    bodies=(RefusedBody,),
    answers=(),
    decode=_refuse,
    prepare=_never,
    encode=_never,
    answer_bytes=_never,
    example={"model": "default"},
)

DIALECTS: tuple[Dialect[Any], ...] = (
    SCORE,
    RERANK,
    TEXT_RANKING,
    CLASSIFY,
    COMPLETIONS,
    TOKENIZE_TEXT,
    DETOKENIZE,
    GENERATING,
)
DIALECT_OF = {path: dialect for dialect in DIALECTS for path in dialect.paths}


def error_answer(
    error: GpuscoreError, record: RequestRecord
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the header fields and the body of an error's answer; note the error in the record."""
    record.refuse(error.status, error.code)
    body = error_json(error, record)
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    if error.retry_after is not None:
        fields.append((b"retry-after", b"%d" % error.retry_after))
    if error.status == 401:
        fields.append((b"www-authenticate", b"Bearer"))
    return fields, body


def error_json(error: GpuscoreError, record: RequestRecord) -> bytes:
    """Return the body of an error's answer, in the shape that clients of the route expect."""
    dialect = DIALECT_OF.get(record.route)
    encode = encode_error if dialect is None else dialect.encode_error
    return encode(error, record.variant)
