"""The body of /v1/score; a large one is decoded part by part, so that no other thread waits for it.

msgspec holds the GIL while it decodes. Ten thousand lists of labels, a million numbers, would take
it a tenth of a second in one call.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpuscore.dialects.others import accepting
from gpuscore.dialects.wire import ItemsBody, ReturnMass, about

Text = str
Ids = list[int]


@accepting("score")
class ScoreBody(ItemsBody):
    """Body of POST /v1/score. `null` means a field's default."""

    # msgspec cannot tell list[str] from list[list[int]] in a union, so `text.joining` checks that
    # all are of one kind.
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


PART = 2**15  # bytes of entries that are decoded in one call
# Of the fields with many entries.
_decoders: dict[str, msgspec.json.Decoder[list[Any]]] = {
    "items": msgspec.json.Decoder(list[Text | Ids | None]),
    "label_token_ids": msgspec.json.Decoder(list[int | Ids]),
}
_raw_entries = msgspec.json.Decoder(list[msgspec.Raw])
_NULL = msgspec.Raw(b"null")
_outer = msgspec.json.Decoder(
    msgspec.defstruct(
        "OuterScoreBody",
        [
            (field.name, msgspec.Raw, _NULL)
            if field.name in _decoders
            else (field.name, field.type, field.default)
            for field in msgspec.structs.fields(ScoreBody)
        ],
        forbid_unknown_fields=True,
    )
)


def decode_in_parts(body: bytes) -> ScoreBody | None:
    """Return what msgspec makes of a body; None if the whole is to be decoded at once.

    A wrong body is decoded at once, so that its error names the right place.
    """
    try:
        outer = _outer.decode(body)
        fields = {name: getattr(outer, name) for name in outer.__struct_fields__}
        for name, decoder in _decoders.items():
            fields[name] = _entries(fields[name], decoder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return ScoreBody(**fields)


def _entries(raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[Any]]) -> list[Any] | None:
    if raw == _NULL:
        return None
    entries: list[Any] = []
    some, size = list[msgspec.Raw](), 0
    left = _raw_entries.decode(raw)
    left.reverse()  # so that each is released once it is decoded
    while left:
        some.append(left.pop())
        size += len(memoryview(some[-1]))
        if size > PART:
            entries += decoder.decode(b"[%b]" % b",".join(some))
            some, size = [], 0
    return entries + decoder.decode(b"[%b]" % b",".join(some))
