"""The dialect of /v1/score: SGLang's body and answer, with fields of ours.

docs/dialects/score.md describes it. Bodies in pairs are vLLM's (`pairs`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from gpuscore.config import RequestLimits
from gpuscore.dialects.answers import PairsAnswer, ScoreAnswer
from gpuscore.dialects.decoding import accepting, strict_decoder
from gpuscore.dialects.dialect import (
    HOLE,
    NUMBER_BYTES,
    NUMBERS,
    SMALL_CHARS,
    SMALL_ITEMS,
    SMALL_TOKENS,
    Dialect,
    ItemsBody,
    PreparedBody,
    error_bytes,
    in_pieces,
    list_json,
    lists_json,
    nulls,
)
from gpuscore.dialects.pairs import (
    PairsBody,
    are_pairs,
    decode_pairs,
    encode_pairs,
    pairs_bytes,
)
from gpuscore.dialects.paths import SCORE_PATHS
from gpuscore.dialects.ranking import prepare_ranking
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import PromptTokensDetails, ReturnMass, TokenUsage, about
from gpuscore.errors import InvalidRequest
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreResult
from gpuscore.types.results import (
    check_temperature,
    label_logprobs,
    label_mass,
    label_scores,
    rows_apart,
    spread,
)

Text = str
Ids = list[int]


@accepting("score")
class ScoreBody(ItemsBody):
    """Body of POST /v1/score. `null` means a field's default."""

    input: ClassVar[ScoreInput]
    # msgspec cannot tell list[str] from list[list[int]] in a union, so `ScoreInput` checks that all
    # are of one kind.
    items: Annotated[
        Text | list[Text | Ids | None] | None,
        about(
            "Required. The candidates to score: all texts or all lists of token ids, of the same "
            "kind as `query`. One text counts as one item; an empty list gives an empty answer. "
            "null is an item that cannot be scored: see `on_error`."
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
            "item. Give this, `labels` or `label_sequences`; if all are null, the labels of the "
            "model's family, or all its classes, are used."
        ),
    ] = None
    labels: Annotated[
        list[str] | None,
        about(
            "Label texts of any number of tokens, or names of classes, for all items. Each is "
            "tokenised on its own."
        ),
    ] = None
    label_sequences: Annotated[
        list[Ids] | None,
        about("Labels as lists of token ids, of any length from 1, for all items."),
    ] = None
    label_length_normalization: Annotated[
        Annotated[str, Meta(pattern=r"^(none|mean)\Z")] | None,
        about(
            "`mean`: the logarithm of a label's probability is divided by the label's number of "
            "tokens before it becomes a score. Changes `scores` only.",
            "none",
        ),
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
        about(
            "Divides the logits, or the sums of log-probabilities of labels of several tokens; "
            "positive, and other than 1 only with `apply_softmax`.",
            1.0,
        ),
    ] = None
    item_first: Annotated[
        bool | None, about("Prompts are item + query instead of query + item.", False)
    ] = None
    return_label_logprobs: Annotated[
        bool | None,
        about("Adds `label_logprobs`: log-probabilities over the whole vocabulary.", False),
    ] = None
    return_label_mass: ReturnMass = None
    score_extraction_token: Annotated[
        str | None,
        about(
            "The text of one token. Each item is scored after every occurrence of it, in one pass: "
            "its entry in `scores` is a list of rows, in order. Every item holds it, the query "
            "does not."
        ),
    ] = None
    score_extraction_token_id: Annotated[
        int | None, about("The same token by its id; give one of both.")
    ] = None

    @property
    def num_items(self) -> int:
        return len(self.input.items)

    @property
    def given(self) -> Sequence[Text | Ids | None]:
        """The items as a list."""
        return [self.items] if isinstance(self.items, str) else self.items or ()

    def refused(self) -> Iterator[tuple[int, InvalidRequest]]:
        return nulls(self.given, "items", "a text or token ids")


_decoded = strict_decoder(ScoreBody)


def decode_score(
    body: bytes, record: RequestRecord, limits: RequestLimits | None
) -> ScoreBody | PairsBody:
    """Decode and check a body; raise InvalidRequest, whose message never holds the body's text."""
    try:
        decoded = _decoded(body, record, limits)
    except InvalidRequest:
        if not are_pairs(body):
            raise
        return decode_pairs(body, record, limits)
    if decoded.items is None:
        raise InvalidRequest("items is required", param="items")
    check_temperature(_temperature(decoded), bool(decoded.apply_softmax))
    decoded.read_as(_to_input(decoded))
    return decoded


def _to_input(body: ScoreBody) -> ScoreInput:
    """Return the body as a `ScoreInput`, with an empty item in the place of each null; raise
    GpuscoreError if fields contradict each other."""
    given = body.given
    is_text = isinstance(body.query or None, str) or str in set(map(type, given))
    empty: Text | Ids = "" if is_text else []
    label_ids: Any = body.label_token_ids  # `ScoreInput` checks that its lists are of one kind
    whole = not body.apply_softmax or body.return_label_logprobs or body.return_label_mass
    token = body.score_extraction_token
    if token is not None and body.score_extraction_token_id is not None:
        name = "score_extraction_token"
        raise InvalidRequest(f"{name} and {name}_id exclude each other", param=name)
    return ScoreInput(
        query=body.query if body.query is not None else "",
        items=[empty if item is None else item for item in given],
        label_token_ids=label_ids,
        labels=body.labels,
        label_sequences=body.label_sequences,
        item_first=bool(body.item_first),
        need_lse=bool(whole),
        terms=body.terms,
        extraction=body.score_extraction_token_id if token is None else token,
    )


def check_score(body: ScoreBody | PairsBody, model: LoadedModel | None) -> None:
    """Raise MissingLabels if the body names no labels and the model is known to have no default."""
    if not isinstance(body, PairsBody) and model is not None:
        body.input.check_labels(model.default_labels)


def prepare_score(model: LoadedModel, body: ScoreBody | PairsBody) -> PreparedBody[Any]:
    """Build the engine's request; raise GpuscoreError if it is invalid."""
    if isinstance(body, PairsBody):
        return prepare_ranking(model, body)
    errors = body.errors(model, "items", body.num_items)
    inputs = body.input
    if inputs.extraction is None:
        inputs = replace(inputs, extraction=model.prompts.step_token)
    request = model.prompts.builder.build(inputs, errors, model.default_labels)
    return PreparedBody.of(body, request, errors=errors)


def _is_small(body: ScoreBody | PairsBody) -> bool:
    """Return True if a body is faster to build here than in a thread."""
    if isinstance(body, PairsBody) or body.num_items > SMALL_ITEMS:
        return False
    inputs = body.input
    labels = [*(inputs.labels or ()), *(inputs.label_sequences or ())]
    most = SMALL_CHARS if inputs.is_text or inputs.labels else SMALL_TOKENS
    return sum(map(len, (inputs.query, *inputs.items, *labels))) <= most


def score_bytes(prepared: PreparedBody[Any]) -> int:
    if isinstance(prepared.body, PairsBody):
        return pairs_bytes(prepared)
    body: ScoreBody = prepared.body
    request = prepared.request
    rows = body.num_items
    labels = 0
    if request is not None:
        labels = sum(map(len, request.label_ids))
        rows += request.num_rows if request.readouts else 0
    tables = 2 if body.return_label_logprobs else 1
    masses = NUMBER_BYTES * rows if body.return_label_mass else 0
    return tables * (NUMBER_BYTES * labels + 5 * rows) + masses + error_bytes(prepared.errors)


def encode_score(prepared: PreparedBody[Any]) -> Iterator[bytes]:
    """Return the scores as JSON; for pairs, vLLM's answer."""
    if isinstance(prepared.body, PairsBody):
        return encode_pairs(prepared)
    body: ScoreBody = prepared.body
    softmax = bool(body.apply_softmax)
    temperature = _temperature(body)
    mean = body.label_length_normalization == "mean"
    tokens = prepared.prompt_tokens
    answer = ScoreAnswer(
        scores=HOLE,
        model=prepared.model,
        usage=TokenUsage(tokens, tokens, 0, PromptTokensDetails(prepared.cached_tokens)),
        object="scoring",
        label_logprobs=HOLE if body.return_label_logprobs else None,
        label_mass=HOLE if body.return_label_mass else None,
        errors=prepared.failed_items,
    )
    errors = prepared.errors or ()
    count = body.num_items
    if prepared.result is None:
        tables = 1 + bool(body.return_label_logprobs) + bool(body.return_label_mass)
        return in_pieces(answer, *(list_json(spread((), errors, count)) for _ in range(tables)))
    request = prepared.engine_request
    trie = request.trie
    labels, result = rows_apart(request, prepared.result)
    step = max(1, NUMBERS // max(map(len, labels)))

    def scores(part: ScoreResult, _: slice) -> Iterable[Float64Array]:
        lengths = trie.lengths if mean and trie else None
        return label_scores(part, apply_softmax=softmax, temperature=temperature, lengths=lengths)

    def masses(part: ScoreResult, rows: slice) -> Iterable[Float64Array]:
        return label_mass(part, labels[rows], trie)

    def table(
        compute: Callable[[ScoreResult, slice], Iterable[Float64Array]],
    ) -> Iterator[bytes]:
        """Return a JSON list of the items' rows, or with `readouts` of their lists of rows; null
        for an item with an error."""
        some = (slice(start, start + step) for start in range(0, len(labels), step))
        rows = (row.tolist() for part in some for row in compute(result.part(part), part))
        if request.readouts is None:
            return list_json(spread(rows, errors, count), step)
        counts = map(len, request.readouts.places[1:])
        return lists_json(rows, spread(counts, errors, count), step)

    parts = [table(scores)]
    if body.return_label_logprobs:
        parts.append(table(lambda part, _: label_logprobs(part)))
    if body.return_label_mass:
        parts.append(table(masses))
    return in_pieces(answer, *parts)


def _temperature(body: ScoreBody) -> float:
    return 1.0 if body.temperature is None else body.temperature


SCORE = Dialect(
    paths=SCORE_PATHS,
    summary="Score items",
    description="Probabilities of label tokens after each `query + item` prompt.",
    bodies=(ScoreBody, PairsBody),
    answers=(ScoreAnswer, PairsAnswer),
    decode=decode_score,
    prepare=prepare_score,
    encode=encode_score,
    answer_bytes=score_bytes,
    check=check_score,
    is_small=_is_small,
    example={
        "query": "query: a blue wooden chair for the garden\nitem: ",
        "items": ["A wooden garden chair in blue.", "A red steel lamp."],
        "labels": ["yes", "no"],
        "apply_softmax": True,
    },
)
