"""The wire of /v1/score: SGLang's body and answer, with what is ours added (docs/score.md)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from gpuscore.engine.scores import (
    check_temperature,
    label_logprobs,
    label_mass,
    label_scores,
)
from gpuscore.errors import InvalidRequest
from gpuscore.server.dialects.dialect import Dialect
from gpuscore.server.dialects.pairs import (
    PairsAnswer,
    PairsBody,
    answer_pairs,
    are_pairs,
    decode_pairs,
)
from gpuscore.server.paths import SCORE_PATH
from gpuscore.server.record import RESPOND, TOKENIZE, RequestRecord
from gpuscore.server.schema import (
    CacheSalt,
    Priority,
    PromptTokensDetails,
    Usage,
    decoding_errors,
)
from gpuscore.server.service import SMALL_ITEMS, SMALL_TOKENS, Call, ScoringService, cached_tokens
from gpuscore.text.prompts import PromptBuilder, ScoreInput
from gpuscore.types import ScoreRequest, ScoreResult

Text = str
Ids = list[int]


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/score. `null` means a field's default."""

    # msgspec cannot tell list[str] from list[list[int]] in a union, so kinds are checked later.
    items: Text | list[Text | Ids] | None = None
    query: Text | Ids | None = None
    label_token_ids: list[int | Ids] | None = None
    labels: list[str] | None = None
    apply_softmax: bool | None = None
    temperature: float | None = None
    item_first: bool | None = None
    model: str | None = None
    return_label_logprobs: bool | None = None
    return_label_mass: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    # SGLang's further fields: understood, so that they can be refused by name.
    return_token_logprobs: bool | None = None
    return_pooled_hidden_states: bool | None = None
    score_extraction_token: str | None = None
    embed_override_token_id: int | None = None
    query_embed_overrides: list[list[float]] | None = None
    item_embed_overrides: list[list[list[float]] | None] | None = None

    @property
    def softmax(self) -> bool:
        return bool(self.apply_softmax)

    @property
    def need_lse(self) -> bool:
        return not self.softmax or bool(self.return_label_logprobs or self.return_label_mass)


class ScoreAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/score."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: str
    label_logprobs: list[list[float]] | None = None
    label_mass: list[float] | None = None


_UNSUPPORTED = (
    "return_token_logprobs",
    "return_pooled_hidden_states",
    "score_extraction_token",
    "embed_override_token_id",
    "query_embed_overrides",
    "item_embed_overrides",
)
_decoder = msgspec.json.Decoder(ScoreBody)


def decode_score(body: bytes, record: RequestRecord) -> ScoreBody | PairsBody:
    """Raises InvalidRequest whose message never holds the body's text."""
    try:
        with decoding_errors():
            decoded = _decoder.decode(body)
    except InvalidRequest:
        if not are_pairs(body):
            raise
        return decode_pairs(body)
    for field in _UNSUPPORTED:
        value = getattr(decoded, field)
        if value is not None and value is not False:  # 0 == False, and 0 is a token id
            raise InvalidRequest(f"{field} is not supported by this server", param=field)
    return decoded


def to_input(body: ScoreBody, default_labels: Sequence[int] | None) -> ScoreInput:
    """The request in the words of `text.prompts`; raises for fields that do not go together."""
    if body.items is None:
        raise InvalidRequest("items is required", param="items")
    label_ids: Sequence[Any] | None = body.label_token_ids
    if label_ids is None and body.labels is None:
        label_ids = default_labels
    return ScoreInput(
        query=body.query if body.query is not None else "",
        items=[body.items] if isinstance(body.items, str) else body.items,
        label_token_ids=label_ids,
        labels=body.labels,
        item_first=bool(body.item_first),
        need_lse=body.need_lse,
        priority=body.priority or 0,
    )


async def answer_score(service: ScoringService, body: ScoreBody | PairsBody, call: Call) -> bytes:
    """Raises GpuscoreError: the subclass that the wire contract names."""
    if isinstance(body, PairsBody):
        return await answer_pairs(service, body, call)
    given = to_input(body, service.default_labels)
    call.record.items = len(given.items)
    temperature = 1.0 if body.temperature is None else body.temperature
    check_temperature(temperature, body.softmax)
    name = service.model_name(body.model)
    model = service.loaded()
    with service.admitted(call.tenant):
        with call.record.stage(TOKENIZE):
            request = await _build(service, model.builder, given, call)
        result = None
        if request is not None:
            result = await service.run(model, request, body.cache_salt, call)
        with call.record.stage(RESPOND):
            answer = partial(_answer, name, body, request, result, temperature)
            small = request is None or len(request.item_ids) <= SMALL_ITEMS
            encoded, usage = answer() if small else await service.in_thread(call, answer)
        call.record.prompt_tokens = usage.prompt_tokens
        call.record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        return encoded


async def _build(
    service: ScoringService, builder: PromptBuilder, given: ScoreInput, call: Call
) -> ScoreRequest | None:
    if _is_small(given):
        return builder.build(given)
    return await service.in_turns(call, partial(builder.build, given))


def _is_small(given: ScoreInput) -> bool:
    """Whether a request takes less time to build than to hand to a thread and back; never text."""
    if given.labels is not None or len(given.items) > SMALL_ITEMS:
        return False
    if any(isinstance(item, str) for item in given.items):
        return False
    return len(given.query) + sum(map(len, given.items)) <= SMALL_TOKENS


def _answer(
    name: str,
    body: ScoreBody,
    request: ScoreRequest | None,
    result: ScoreResult | None,
    temperature: float,
) -> tuple[bytes, Usage]:
    """The answer as JSON, and what it says of the tokens."""
    if request is None or result is None:
        answer = _empty_answer(name, body)
    else:
        answer = _full_answer(name, body, request, result, temperature)
    return msgspec.json.encode(answer), answer.usage


def _full_answer(
    name: str, body: ScoreBody, request: ScoreRequest, result: ScoreResult, temperature: float
) -> ScoreAnswer:
    rows = label_scores(result, apply_softmax=body.softmax, temperature=temperature)
    logprobs = mass = None
    if body.return_label_logprobs:
        logprobs = [row.tolist() for row in label_logprobs(result)]
    if body.return_label_mass:
        mass = label_mass(result, request.label_ids).tolist()
    prompt_tokens = request.num_prompt_tokens
    cached = cached_tokens(request, result)
    scores = [row.tolist() for row in rows]
    return ScoreAnswer(scores, name, _usage(prompt_tokens, cached), "scoring", logprobs, mass)


def _empty_answer(name: str, body: ScoreBody) -> ScoreAnswer:
    logprobs: list[list[float]] | None = [] if body.return_label_logprobs else None
    mass: list[float] | None = [] if body.return_label_mass else None
    return ScoreAnswer([], name, _usage(0, 0), "scoring", logprobs, mass)


def _usage(prompt_tokens: int, cached_tokens: int) -> Usage:
    return Usage(prompt_tokens, prompt_tokens, 0, PromptTokensDetails(cached_tokens))


SCORE = Dialect(
    paths=(SCORE_PATH,),
    summary="Score items",
    description="Probabilities of label tokens after each `query + item` prompt.",
    bodies=(ScoreBody, PairsBody),
    answers=(ScoreAnswer, PairsAnswer),
    decode=decode_score,
    answer=answer_score,
    example={
        "query": "query: a blue wooden chair for the garden\nitem: ",
        "items": ["A wooden garden chair in blue.", "A red steel lamp."],
        "labels": ["yes", "no"],
        "apply_softmax": True,
    },
)
