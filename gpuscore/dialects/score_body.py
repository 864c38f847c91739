"""The body of /v1/score."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from msgspec import Meta

from gpuscore.dialects.decoding import accepting
from gpuscore.dialects.wire import ItemsBody, ReturnMass, about, nulls
from gpuscore.errors import InvalidRequest
from gpuscore.text.score_input import ScoreInput

Text = str
Ids = list[int]


@accepting("score")
class ScoreBody(ItemsBody):
    """Body of POST /v1/score. `null` means a field's default."""

    input: ClassVar[ScoreInput]
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
