"""The dialect of /v1/score: SGLang's body and answer, with fields of ours.

docs/dialects/score.md describes it. Bodies in pairs are vLLM's (`pairs`).
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from gpuscore.errors import InvalidRequest
from gpuscore.probabilities import check_temperature, label_logprobs, label_mass, label_scores
from gpuscore.server.api.dialects.dialect import Dialect, PreparedBody, Scored
from gpuscore.server.api.dialects.pairs import (
    CheckedPairs,
    PairsAnswer,
    PairsBody,
    are_pairs,
    decode_pairs,
    encode_pairs,
)
from gpuscore.server.api.dialects.ranking import CheckedRanking, prepare_ranking
from gpuscore.server.api.fields import (
    AnsweredModel,
    CacheSalt,
    ModelName,
    Priority,
    ReturnMass,
    about,
    refused,
)
from gpuscore.server.api.paths import SCORE_PATH
from gpuscore.server.api.schema import PromptTokensDetails, TokenUsage, decoding_errors
from gpuscore.server.observe.record import RequestRecord
from gpuscore.server.served import LoadedModel
from gpuscore.server.service import SMALL_ITEMS, SMALL_TOKENS
from gpuscore.text.joining import ScoreInput
from gpuscore.text.turns import Turns

Text = str
Ids = list[int]


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/score. `null` means a field's default."""

    # msgspec cannot tell list[str] from list[list[int]] in a union, so `text.joining` checks that
    # all are of one kind.
    items: Annotated[
        Text | list[Text | Ids] | None,
        about(
            "Required. The candidates to score: all texts or all lists of token ids, of the same "
            "kind as `query`. One text counts as one item; an empty list gives an empty answer."
        ),
    ] = None
    query: Annotated[
        Text | Ids | None,
        about("The text or token ids that all items share; null means empty.", ""),
    ] = None
    label_token_ids: Annotated[
        list[int | Ids] | None,
        about(
            "The labels, as token ids or as numbers of classes: one list for all items, or one per "
            "item. Give either this or `labels`; if both are null, the labels are those of the "
            "model's family, or all its classes."
        ),
    ] = None
    labels: Annotated[
        list[str] | None,
        about("Label texts of exactly one token each, or names of classes, for all items."),
    ] = None
    apply_softmax: Annotated[
        bool | None,
        about(
            "true: scores are a softmax over the item's labels and sum to 1. false: scores are "
            "probabilities over the whole vocabulary, or over all classes.",
            False,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        about("Divides the logits; positive, and other than 1 only with `apply_softmax`.", 1.0),
    ] = None
    item_first: Annotated[
        bool | None, about("Prompts are item + query instead of query + item.", False)
    ] = None
    model: ModelName = None
    return_label_logprobs: Annotated[
        bool | None,
        about("Adds `label_logprobs`: log-probabilities over the whole vocabulary.", False),
    ] = None
    return_label_mass: ReturnMass = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    # SGLang's other fields are known only so that the error can name them.
    return_token_logprobs: Annotated[bool | None, refused("false is accepted, too.")] = None
    return_pooled_hidden_states: Annotated[bool | None, refused("false is accepted, too.")] = None
    score_extraction_token: Annotated[str | None, refused()] = None
    embed_override_token_id: Annotated[int | None, refused()] = None
    query_embed_overrides: Annotated[list[list[float]] | None, refused()] = None
    item_embed_overrides: Annotated[list[list[list[float]] | None] | None, refused()] = None

    @property
    def softmax(self) -> bool:
        return bool(self.apply_softmax)

    @property
    def need_lse(self) -> bool:
        return not self.softmax or bool(self.return_label_logprobs or self.return_label_mass)


@dataclass(frozen=True, slots=True)
class CheckedScore:
    """A checked body, and its query, items and labels as the engine's request needs them."""

    fields: ScoreBody
    given: ScoreInput

    @property
    def model(self) -> str | None:
        return self.fields.model

    @property
    def num_items(self) -> int:
        return len(self.given.items)


class ScoreAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/score."""

    scores: Annotated[
        list[list[float]], about("A row per item and a number per label, in the request's order.")
    ]
    model: AnsweredModel
    usage: TokenUsage
    object: Annotated[str, about("Always `scoring`.")]
    label_logprobs: Annotated[
        list[list[float]] | None,
        about("Natural logarithms of the labels' probabilities over the whole vocabulary."),
    ] = None
    label_mass: Annotated[
        list[float] | None, about("Per item, the probability of all its labels together.")
    ] = None


_UNSUPPORTED = (
    "return_token_logprobs",
    "return_pooled_hidden_states",
    "score_extraction_token",
    "embed_override_token_id",
    "query_embed_overrides",
    "item_embed_overrides",
)
_decoder = msgspec.json.Decoder(ScoreBody)


def decode_score(body: bytes, record: RequestRecord) -> CheckedScore | CheckedPairs:
    """Decode and check a body; raise InvalidRequest, whose message never holds the body's text."""
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
    if decoded.items is None:
        raise InvalidRequest("items is required", param="items")
    check_temperature(_temperature(decoded), decoded.softmax)
    return CheckedScore(decoded, _to_input(decoded))


def _to_input(body: ScoreBody) -> ScoreInput:
    """Return the body as input for `text.joining`; raise GpuscoreError if fields do not fit."""
    label_ids: Any = body.label_token_ids  # `ScoreInput` checks that its lists are of one kind
    return ScoreInput(
        query=body.query if body.query is not None else "",
        items=[body.items] if isinstance(body.items, str) else body.items or [],
        label_token_ids=label_ids,
        labels=body.labels,
        item_first=bool(body.item_first),
        need_lse=body.need_lse,
        priority=body.priority or 0,
    )


def check_score(body: CheckedScore | CheckedPairs, model: LoadedModel | None) -> None:
    """Raise MissingLabels if the body names no labels and the model is known to have no default."""
    if not isinstance(body, CheckedRanking) and model is not None:
        body.given.check_labels(model.default_labels)


def prepare_score(
    model: LoadedModel, body: CheckedScore | CheckedPairs, turns: Turns
) -> PreparedBody:
    """Build the engine's request; raise GpuscoreError if it is invalid."""
    if isinstance(body, CheckedRanking):
        return prepare_ranking(model, body, turns)
    request = model.builder.build(body.given, turns, model.default_labels)
    if request is None:  # no items
        return PreparedBody(None, prompt_tokens=0)
    return PreparedBody.of(request, body.fields.cache_salt)


def _is_small(body: CheckedScore | CheckedPairs) -> bool:
    """Return True if a body is faster to build here than in a thread; never with any text."""
    if isinstance(body, CheckedRanking):
        return False
    given = body.given
    if given.is_text or given.labels is not None or len(given.items) > SMALL_ITEMS:
        return False
    return len(given.query) + sum(map(len, given.items)) <= SMALL_TOKENS


def encode_score(scored: Scored[Any]) -> bytes:
    """Return the scores as JSON; for pairs, vLLM's answer."""
    if isinstance(scored.body, CheckedRanking):
        return encode_pairs(scored)
    body: ScoreBody = scored.body.fields
    if scored.result is None:
        logprobs: list[list[float]] | None = [] if body.return_label_logprobs else None
        mass: list[float] | None = [] if body.return_label_mass else None
        return _encoded(scored, [], logprobs, mass)
    result, temperature = scored.result, _temperature(body)
    rows = label_scores(result, apply_softmax=body.softmax, temperature=temperature)
    logprobs = mass = None
    if body.return_label_logprobs:
        logprobs = [row.tolist() for row in label_logprobs(result)]
    if body.return_label_mass:
        mass = label_mass(result, scored.request.label_ids).tolist()
    return _encoded(scored, [row.tolist() for row in rows], logprobs, mass)


def _encoded(
    scored: Scored[Any],
    scores: list[list[float]],
    logprobs: list[list[float]] | None,
    mass: list[float] | None,
) -> bytes:
    tokens = scored.prompt_tokens
    usage = TokenUsage(tokens, tokens, 0, PromptTokensDetails(scored.cached_tokens))
    answer = ScoreAnswer(scores, scored.model, usage, "scoring", logprobs, mass)
    return msgspec.json.encode(answer)


def _temperature(body: ScoreBody) -> float:
    return 1.0 if body.temperature is None else body.temperature


SCORE = Dialect(
    paths=(SCORE_PATH,),
    summary="Score items",
    description="Probabilities of label tokens after each `query + item` prompt.",
    bodies=(ScoreBody, PairsBody),
    answers=(ScoreAnswer, PairsAnswer),
    decode=decode_score,
    prepare=prepare_score,
    encode=encode_score,
    check=check_score,
    is_small=_is_small,
    example={
        "query": "query: a blue wooden chair for the garden\nitem: ",
        "items": ["A wooden garden chair in blue.", "A red steel lamp."],
        "labels": ["yes", "no"],
        "apply_softmax": True,
    },
)
