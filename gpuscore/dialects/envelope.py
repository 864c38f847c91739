"""Bodies of other dialects inside a managed platform's own: SageMaker's, which is one of them as it
is, and Vertex AI's, which has several."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from gpuscore.dialects.classify import CLASSIFY
from gpuscore.dialects.dialect import FRAME_BYTES, Dialect, PreparedBody, Scored
from gpuscore.dialects.rerank import RERANK
from gpuscore.dialects.score import SCORE
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import about, strict_decoder
from gpuscore.errors import GpuscoreError, InvalidRequest, TooManyItems, TooManyTokens
from gpuscore.text.boundaries import Turns
from gpuscore.types.record import RequestRecord
from gpuscore.types.results import scored_places

MOST_INSTANCES = 128  # each is a request to the engine, whose queue has room for 1,024 by default
# A field that tells which dialect a body is of; without any, it is a body of /v1/score.
_TOLD_BY: dict[str, Dialect[Any]] = {"documents": RERANK, "texts": RERANK, "input": CLASSIFY}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Inner:
    """A checked body, and its dialect."""

    dialect: Dialect[Any]
    body: Any


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bodies of one request, which are for the same model."""

    inner: tuple[Inner, ...]

    @property
    def model(self) -> str | None:
        return self.inner[0].body.model if self.inner else None

    @property
    def num_items(self) -> int:
        return sum(one.body.num_items for one in self.inner)


def decode_one(data: bytes, record: RequestRecord) -> Inner:
    """Decode a body of /v1/score, /v1/rerank or /v1/classify; raise as these do."""
    try:
        names = _fields.decode(data).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        names = {}.keys()  # the decoder of SCORE says what is wrong
    dialect = next((_TOLD_BY[name] for name in _TOLD_BY if name in names), SCORE)
    return Inner(dialect, dialect.decode(data, record))


def _decode_plain(data: bytes, record: RequestRecord) -> Envelope:
    return Envelope((decode_one(data, record),))


class VertexBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of Vertex AI's predictions."""

    instances: Annotated[list[dict[str, msgspec.Raw]], about("Bodies of our own routes.")]
    parameters: Annotated[
        dict[str, msgspec.Raw] | None, about("Fields that all instances have, unless they say else")
    ] = None


_vertex = strict_decoder(VertexBody)


def _decode_vertex(data: bytes, record: RequestRecord) -> Envelope:
    body, inner = _vertex(data, record), list[Inner]()
    if len(body.instances) > MOST_INSTANCES:
        raise TooManyItems(
            f"{len(body.instances)} instances, the limit is {MOST_INSTANCES}", param="instances"
        )
    for number, instance in enumerate(body.instances):
        with _named(f"instances[{number}]"):
            whole = msgspec.json.encode((body.parameters or {}) | instance)
            inner.append(decode_one(whole, record))
    if len({one.body.model for one in inner}) > 1:
        raise InvalidRequest("all instances must name the same model", param="instances")
    return Envelope(tuple(inner))


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Put the place of a body before the message and the field of its error."""
    try:
        yield
    except GpuscoreError as error:
        param = place if error.param is None else f"{place}.{error.param}"
        message = f"{place}: {error.message}"
        raise type(error)(message, param=param, retry_after=error.retry_after) from error


def check_envelope(body: Envelope, model: LoadedModel | None) -> None:
    for one in body.inner:
        one.dialect.check(one.body, model)


def prepare_envelope(model: LoadedModel, body: Envelope, turns: Turns) -> PreparedBody:
    """Make a request to the engine of each body.

    Raises:
        TooManyItems, TooManyTokens: the bodies together exceed the limits of one request.
        GpuscoreError: a body is invalid for the model.
    """
    limits = model.prompts.builder.limits
    if body.num_items > limits.max_items:
        raise TooManyItems(f"{body.num_items} items, the limit is {limits.max_items}")
    prepared = list[PreparedBody]()
    for one in body.inner:
        prepared.append(one.dialect.prepare(model, one.body, turns))
        tokens = sum(one.request.num_tokens for one in prepared if one.request is not None)
        if tokens > limits.max_request_tokens:
            raise TooManyTokens(f"{tokens} tokens, the limit is {limits.max_request_tokens}")
    salts = {one.salt for one in prepared}
    if len(salts) > 1:
        raise InvalidRequest("all instances must have the same cache_salt", param="instances")
    asked = [
        (one.request, scored_places(one.errors, inner.body.num_items))
        for one, inner in zip(prepared, body.inner, strict=True)
        if one.request is not None
    ]
    return PreparedBody(
        None,
        salts.pop() if salts else None,
        sum(one.prompt_tokens or 0 for one in prepared),
        prepared,
        parts=tuple(request for request, _ in asked),
        places=[places for _, places in asked],
    )


def envelope_bytes(body: Envelope, prepared: PreparedBody) -> int:
    pairs = zip(body.inner, prepared.notes, strict=True)
    return sum(FRAME_BYTES + one.dialect.answer_bytes(one.body, made) for one, made in pairs)


def inner_scored(scored: Scored[Envelope]) -> Iterator[tuple[Inner, Scored[Any]]]:
    """Yield each body with its part of the result."""
    results = iter(scored.parts)
    for one, prepared in zip(scored.body.inner, scored.prepared.notes, strict=True):
        result = None if prepared.request is None else next(results)
        path, name = one.dialect.paths[0], scored.model
        yield one, Scored(one.body, prepared, result, name, scored.request_id, path)


def _encode_plain(scored: Scored[Envelope]) -> Iterator[bytes]:
    ((one, own),) = inner_scored(scored)
    return one.dialect.encode(own)


def _encode_vertex(scored: Scored[Envelope]) -> Iterator[bytes]:
    answers = [one.dialect.encode(own) for one, own in inner_scored(scored)]

    def pieces() -> Iterator[bytes]:
        before = b'{"predictions":['
        for answer in answers:
            yield before
            yield from answer
            before = b","
        yield b"]}" if answers else before + b"]}"

    return pieces()


def _is_small(body: Envelope) -> bool:
    return len(body.inner) == 1 and body.inner[0].dialect.is_small(body.inner[0].body)


PLAIN = Dialect(
    paths=(),
    summary="A body of our own routes",
    description="A body of /v1/score, /v1/rerank or /v1/classify, which its fields tell apart.",
    bodies=(),
    answers=(),
    decode=_decode_plain,
    prepare=prepare_envelope,
    encode=_encode_plain,
    answer_bytes=envelope_bytes,
    check=check_envelope,
    is_small=_is_small,
    example=SCORE.example,
)
VERTEX = replace(
    PLAIN,
    summary="Predictions",
    description="Several bodies of /v1/score, /v1/rerank or /v1/classify.",
    decode=_decode_vertex,
    encode=_encode_vertex,
    example={"instances": [SCORE.example]},
)
