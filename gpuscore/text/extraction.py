"""Several scores in one item: one for each occurrence of the extraction token."""

from collections.abc import Sequence

import numpy as np

from gpuscore.errors import InvalidRequest, TooManyLabels
from gpuscore.text.score_input import ScoreInput, need_encoder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import NO_ROWS, BackendLimits, Int32Array, Rows
from gpuscore.types.request import Readouts

MAX_SCORES = 2**22  # most scores of a request; an answer takes about twenty bytes for each


def extraction_id(
    token: str | int, inputs: ScoreInput, encoder: TextEncoder | None, backend: BackendLimits
) -> int:
    """Return the id of a request's extraction token.

    Raises:
        InvalidRequest: the text is not one token, the model does not have the id, or a query of
            token ids contains it.
    """
    param = "score_extraction_token"
    if inputs.item_first:
        raise InvalidRequest(f"{param} cannot be used with item_first", param="item_first")
    if isinstance(token, str):
        ids = need_encoder(encoder, param).plain_ids(token).tolist()
        if len(ids) != 1:
            raise InvalidRequest(f"{param} is {len(ids)} tokens; it must be one", param=param)
        token = int(ids[0])
    else:
        param += "_id"
    if not 0 <= token < backend.vocab_rows:
        raise InvalidRequest(
            f"{param} is {token}, valid are 0 to {backend.vocab_rows - 1}", param=param
        )
    if not isinstance(inputs.query, str):
        check_query(token, inputs.query)
    return token


def check_query(token: int, query: Sequence[int] | Int32Array) -> None:
    """Raise InvalidRequest if the query holds the extraction token."""
    if len(places := np.flatnonzero(np.asarray(query) == token)):
        raise InvalidRequest(
            f"token {places[0]} of the query is the extraction token, {token}; only items may "
            "hold it",
            param="query",
        )


def read_at(
    token: int, query: Int32Array, items: Sequence[Int32Array], labels: Sequence[Int32Array]
) -> tuple[Int32Array, tuple[Int32Array, ...], tuple[Int32Array, ...], Readouts]:
    """Return query, items, labels and read-outs of a request with an extraction token.

    All its occurrences end up in the items: if the query contains it, because the items share a
    beginning, the rest of the query from there on is moved back to the items.

    Raises:
        TooManyLabels: the rows have more than MAX_SCORES labels in all.
    """
    if len(in_query := np.flatnonzero(query == token)):
        rest = query[in_query[0] :]
        query = query[: in_query[0]]
        items = [np.concatenate((rest, item)) for item in items]
    places = [np.flatnonzero(item == token).astype(np.int32) for item in items]
    pairs = [*zip(places, labels, strict=True)]
    total = sum(len(rows) * len(ids) for rows, ids in pairs)
    if total > MAX_SCORES:
        param = "score_extraction_token"
        raise TooManyLabels(f"{total} scores, the limit is {MAX_SCORES}", param=param)
    item_rows = [Rows(rows, np.full_like(rows, len(ids))) for rows, ids in pairs]
    item_labels = tuple(np.tile(ids, len(rows)) for rows, ids in pairs)
    return query, tuple(items), item_labels, Readouts.of([NO_ROWS, *item_rows])
