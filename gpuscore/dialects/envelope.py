"""Bodies of managed platforms, which hold bodies of other dialects: SageMaker's is a single one, or
has one on each line; Vertex AI's holds several."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
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
MOST_LINES = 1024  # 1 KiB each in the least that batch transform can send at once, 1 MiB
# A field that tells which dialect a body is of; without any, it is a body of /v1/score.
_TOLD_BY: dict[str, Dialect[Any]] = {"documents": RERANK, "texts": RERANK, "input": CLASSIFY}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Inner:
    """A checked body, its dialect, and its place for messages, if there are several."""

    dialect: Dialect[Any]
    body: Any
    place: str = ""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bodies of one request, which are for the same model."""

    inner: tuple[Inner, ...]

    @property
    def model(self) -> str | None:
        return self.inner[0].body.model if self.inner else None

    @property
    def num_items(self) -> int:
        return sum(inner.body.num_items for inner in self.inner)


def decode_one(data: bytes, record: RequestRecord, place: str = "") -> Inner:
    """Decode a body of /v1/score, /v1/rerank or /v1/classify; raise as these do."""
    try:
        names = _fields.decode(data).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        names = {}.keys()  # the decoder of SCORE says what is wrong
    dialect = next((_TOLD_BY[name] for name in _TOLD_BY if name in names), SCORE)
    with _named(place):
        return Inner(dialect, dialect.decode(data, record), place)


def _decode_plain(data: bytes, record: RequestRecord) -> Envelope:
    return Envelope((decode_one(data, record),))


def _decode_lines(data: bytes, record: RequestRecord) -> Envelope:
    data = data.removesuffix(b"\n")
    if (lines := data.count(b"\n") + 1) > MOST_LINES:
        raise TooManyItems(f"{lines} lines, the limit is {MOST_LINES}")
    numbered = enumerate(data.split(b"\n"), 1)
    return _of_one_model([decode_one(line, record, f"line {n}") for n, line in numbered])


def _of_one_model(inner: list[Inner]) -> Envelope:
    if len({part.body.model for part in inner}) > 1:
        raise InvalidRequest("all bodies of a request must name the same model", param="model")
    return Envelope(tuple(inner))


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
        whole = msgspec.json.encode((body.parameters or {}) | instance)
        inner.append(decode_one(whole, record, f"instances[{number}]"))
    return _of_one_model(inner)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Put the place of a body, if it has one, before the message and the field of its error."""
    try:
        yield
    except GpuscoreError as error:
        if not place:
            raise
        param = place if error.param is None else f"{place}.{error.param}"
        message = f"{place}: {error.message}"
        raise type(error)(message, param=param, retry_after=error.retry_after) from error


def check_envelope(body: Envelope, model: LoadedModel | None) -> None:
    for inner in body.inner:
        with _named(inner.place):
            inner.dialect.check(inner.body, model)


def prepare_envelope(model: LoadedModel, body: Envelope, turns: Turns) -> PreparedBody:
    """Make each body's request to the engine.

    Raises:
        TooManyItems, TooManyTokens: the bodies together exceed the limits of one request.
        GpuscoreError: a body is invalid for the model.
    """
    limits = model.prompts.builder.limits
    if body.num_items > limits.max_items:
        raise TooManyItems(f"{body.num_items} items, the limit is {limits.max_items}")
    prepared, tokens = list[PreparedBody](), 0
    for part in body.inner:
        with _named(part.place):
            made = part.dialect.prepare(model, part.body, turns)
        prepared.append(made)
        tokens += 0 if made.request is None else made.request.num_tokens
        if tokens > limits.max_request_tokens:
            raise TooManyTokens(f"{tokens} tokens, the limit is {limits.max_request_tokens}")
    salts = {part.salt for part in prepared}
    if len(salts) > 1:
        raise InvalidRequest(
            "all bodies of a request must have the same cache_salt", param="cache_salt"
        )
    asked = [
        (part.request, scored_places(part.errors, inner.body.num_items))
        for part, inner in zip(prepared, body.inner, strict=True)
        if part.request is not None
    ]
    return PreparedBody(
        None,
        salts.pop() if salts else None,
        sum(part.prompt_tokens or 0 for part in prepared),
        prepared,
        parts=tuple(request for request, _ in asked),
        places=[places for _, places in asked],
    )


def envelope_bytes(body: Envelope, prepared: PreparedBody) -> int:
    pairs = zip(body.inner, prepared.notes, strict=True)
    return sum(FRAME_BYTES + inner.dialect.answer_bytes(inner.body, made) for inner, made in pairs)


def inner_scored(scored: Scored[Envelope]) -> Iterator[tuple[Inner, Scored[Any]]]:
    """Yield each body with its part of the result."""
    results = iter(scored.parts)
    for inner, prepared in zip(scored.body.inner, scored.prepared.notes, strict=True):
        result = None if prepared.request is None else next(results)
        path, name = inner.dialect.paths[0], scored.model
        yield inner, Scored(inner.body, prepared, result, name, scored.request_id, path)


def _encode_plain(scored: Scored[Envelope]) -> Iterator[bytes]:
    ((inner, own),) = inner_scored(scored)
    return inner.dialect.encode(own)


def _answers(scored: Scored[Envelope]) -> list[Iterator[bytes]]:
    return [inner.dialect.encode(own) for inner, own in inner_scored(scored)]


def _encode_lines(scored: Scored[Envelope]) -> Iterator[bytes]:
    """Return lines without a newline at the end, which batch transform adds (AssembleWith)."""
    first, *others = _answers(scored)
    return chain(first, *(chain((b"\n",), answer) for answer in others))


def _encode_vertex(scored: Scored[Envelope]) -> Iterator[bytes]:
    answers = _answers(scored)

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
LINES = replace(
    PLAIN,
    decode=_decode_lines,
    encode=_encode_lines,
    media_type="application/jsonlines",
    large=1024,  # these may be 80 lines, which take a millisecond
)
VERTEX = replace(
    PLAIN,
    summary="Predictions",
    description="Several bodies of /v1/score, /v1/rerank or /v1/classify.",
    decode=_decode_vertex,
    encode=_encode_vertex,
    example={"instances": [SCORE.example]},
)
