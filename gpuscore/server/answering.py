"""The steps that answer every dialect's requests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpuscore.dialects.dialect import (
    FRAME_BYTES,
    BodyT,
    Dialect,
    PreparedBody,
    Scored,
    answered_name,
    choose,
    next_part,
    text_bytes,
)
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import NonfiniteScore
from gpuscore.server.service import RequestContext, ScoringService
from gpuscore.text.turns import ALONE, Turns
from gpuscore.types.item_errors import renumbered, scored_places
from gpuscore.types.record import RESPOND, TOKENIZE
from gpuscore.types.request import ScoreRequest, ScoreResult

SMALL_ANSWER = 2**16  # bytes; up to here an answer is encoded on the event loop
LARGE_ANSWER = 10**6  # bytes; a larger answer is sent while it is made


@dataclass(frozen=True, slots=True)
class MadeAnswer:
    """An answer as JSON: its first bytes, and the pieces that follow if it is a large one."""

    first: bytes
    rest: Iterator[bytes] | None = None


async def answer(
    service: ScoringService, dialect: Dialect[BodyT], body: BodyT, call: RequestContext
) -> MadeAnswer:
    """Return the answer to a body.

    Raises:
        GpuscoreError: the request is refused or has failed; each subclass is one code.
    """
    record = call.record
    record.items = body.num_items
    served = choose(service.models, dialect, body)
    record.model = served.name
    model = served.ready()
    with record.stage(TOKENIZE):
        if dialect.is_small(body):
            prepared, size = _prepared(model, dialect, body, ALONE)
        else:
            work = partial(_prepared, model, dialect, body)
            prepared, size = await service.in_turns(call, work)
    name = answered_name(served, body)
    size += FRAME_BYTES + text_bytes(name)
    call.reserve(size)
    result, parts = None, list[ScoreResult]()
    if prepared.parts:
        parts = await _results(service, model, prepared, call)
    elif prepared.request is not None:
        try:
            result = await service.run(model, prepared.request, prepared.salt, call)
        except NonfiniteScore as error:
            raise renumbered(error, scored_places(prepared.errors, body.num_items)) from error
    scored = Scored(body, prepared, result, name, record.request_id, call.path, parts)
    pieces = _encoded(partial(dialect.encode, scored))
    if prepared.prompt_tokens is None:
        return await _begun(service, call, pieces, size)
    with record.stage(RESPOND):
        record.prompt_tokens, record.cached_tokens = scored.prompt_tokens, scored.cached_tokens
        if prepared.request is not None:
            record.label_tokens = prepared.request.num_label_tokens + prepared.label_tokens
        del prepared, result, parts, scored
        return await _begun(service, call, pieces, size)


def _prepared(
    model: LoadedModel, dialect: Dialect[BodyT], body: BodyT, turns: Turns
) -> tuple[PreparedBody, int]:
    prepared = dialect.prepare(model, body, turns)
    return prepared, dialect.answer_bytes(body, prepared)


def _encoded(encode: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of an answer; the first one is asked for where the work is to be done."""
    pieces = encode()
    del encode  # it has the body
    yield from pieces


async def _begun(
    service: ScoringService, call: RequestContext, pieces: Iterator[bytes], size: int
) -> MadeAnswer:
    """Return the answer, whole up to LARGE_ANSWER; its size is at most `size`."""
    if size <= SMALL_ANSWER:
        return MadeAnswer(b"".join(pieces))
    made, length = list[bytes](), 0
    while length <= LARGE_ANSWER:
        part = await service.in_thread(call, partial(next_part, pieces))
        if part is None:
            return MadeAnswer(b"".join(made))
        made.append(part)
        length += len(part)
    return MadeAnswer(b"".join(made), pieces)


async def _results(
    service: ScoringService, model: LoadedModel, prepared: PreparedBody, call: RequestContext
) -> list[ScoreResult]:
    """Return the results of all parts of a body, which run at once; the first error ends all."""

    async def one(request: ScoreRequest, items: Sequence[int]) -> ScoreResult:
        try:
            return await service.run(model, request, prepared.salt, call)
        except NonfiniteScore as error:
            raise renumbered(error, items) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [*map(group.create_task, map(one, prepared.parts, prepared.places))]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
