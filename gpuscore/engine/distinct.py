"""Equal items of a request: computed once, so that their scores have the same bits."""

from dataclasses import dataclass, replace

import numpy as np

from gpuscore.types.arrays import Int32Array
from gpuscore.types.request import ScoreRequest, ScoreResult


@dataclass(frozen=True, slots=True)
class DistinctItems:
    """A request without the items that repeat an earlier one.

    Args:
        request: has the first of equal items.
        places: of each item of the caller's request, the item of `request` that is equal.
    """

    request: ScoreRequest
    places: Int32Array  # [items of the caller's request]

    def first(self, item: int) -> int:
        """Return the caller's first item that is an item of `request`."""
        return int(np.argmax(self.places == item))

    def spread(self, result: ScoreResult) -> ScoreResult:
        """Return the result of `request` as that of the caller's request."""
        places, logits = self.places, result.label_logits
        return replace(
            result,
            label_logits=tuple(logits[place] for place in places.tolist()),
            lse=None if result.lse is None else result.lse[places],
            top_ids=None if result.top_ids is None else result.top_ids[places],
            top_logits=None if result.top_logits is None else result.top_logits[places],
        )


def distinct_items(request: ScoreRequest) -> DistinctItems | None:
    """Return a request's distinct items; None if no two are equal, tokens and labels.

    Also None if items form trees, or if every position is scored: `engine/trees.py` shares these.
    """
    if len(request.item_ids) < 2 or request.parents is not None or request.every_position:
        return None
    labels = {id(ids): ids.tobytes() for ids in request.label_ids}  # usually one for all items
    found: dict[tuple[bytes, bytes], int] = {}
    places = [
        found.setdefault((item.tobytes(), labels[id(ids)]), len(found))
        for item, ids in zip(request.item_ids, request.label_ids, strict=True)
    ]
    if len(found) == len(places):
        return None
    firsts = np.unique(places, return_index=True)[1].tolist()
    nodes = request.nodes
    if nodes is not None:
        nodes = np.flatnonzero(np.isin(firsts, nodes)).astype(np.int32)
    made = replace(
        request,
        item_ids=tuple(request.item_ids[i] for i in firsts),
        label_ids=tuple(request.label_ids[i] for i in firsts),
        nodes=nodes,
    )
    return DistinctItems(made, np.array(places, np.int32))
