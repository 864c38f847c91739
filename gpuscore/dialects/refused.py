"""Routes that generate text or make embeddings on other servers: answered 400, not 404, so that
the message can say why."""

from typing import Annotated, NoReturn

import msgspec

from gpuscore.dialects.dialect import Dialect
from gpuscore.dialects.paths import GENERATING_PATHS
from gpuscore.dialects.wire import about
from gpuscore.errors import InvalidRequest
from gpuscore.types.record import RequestRecord

SCORES_ONLY = "this server scores only and generates nothing"


class RefusedBody(msgspec.Struct):
    """Body of a route that always answers 400."""

    model: Annotated[str | None, about("Not read.")] = None

    @property
    def num_items(self) -> None:
        return None


def _refuse(body: bytes, record: RequestRecord) -> RefusedBody:
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
