"""The places of the rows of a request for every position in its answer."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpuscore.engine.jobs import QUERY, Share
from gpuscore.types.arrays import BoolArray
from gpuscore.types.request import ScoreRequest

Places = NDArray[np.integer]


class Positions:
    """The places of the rows of a request for every position, and which rows have arrived.

    The rows of a beginning that several items share are computed once, and belong to all of them.

    Args:
        request: as it was asked.
        computed: the form in which it is computed.
        origin: of each item of `computed`: the item of `request`, -1 = a shared beginning; None if
            both have the same items.
    """

    def __init__(
        self, request: ScoreRequest, computed: ScoreRequest, origin: Sequence[int] | None
    ) -> None:
        # The first row of the query, if it is scored, and of each item; then the number of rows.
        firsts = [0, *accumulate(map(len, request.row_labels))]
        self._there = np.zeros(firsts[-1], dtype=np.bool_)
        first_item = 0 if request.query_labels is None else 1
        count = len(computed.item_ids)
        parents = [-1] * count if computed.parents is None else computed.parents.tolist()
        depths: list[int] = []  # tokens between the query and the item
        for parent in parents:
            above = depths[parent] + len(computed.item_ids[parent]) if parent >= 0 else 0
            depths.append(above)
        items = [[item] for item in (range(count) if origin is None else origin)]
        for item in reversed(range(count)):  # descendants before ancestors
            items[item] = [one for one in items[item] if one >= 0]
            if parents[item] >= 0:
                items[parents[item]] += items[item]
        # Of each item of `computed`: the rows of the answer where its first row belongs.
        self._starts = {
            item: np.array([firsts[first_item + one] + depths[item] for one in items[item]])
            for item in range(count)
        }
        self._starts[QUERY] = np.zeros(1, np.int64)

    def of(self, share: Share, fine: BoolArray) -> tuple[list[int], Places, Places]:
        """Find the places of a share's rows.

        Args:
            fine: bool [rows of the share], False where a number is not finite.

        Returns:
            The items of `computed` (or QUERY) with a row that is not fine, whose rows are left out;
            and the numbers of the other rows within the share, each with a place in the answer.
        """
        broken: list[int] = []
        kept, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        stop = 0
        for item, first, count in share.positions:
            start, stop = stop, stop + count
            if not fine[start:stop].all():
                broken.append(item)
                continue
            rows, starts = np.arange(count), self._starts[item]
            kept.append(np.tile(rows + start, len(starts)))
            places.append((starts[:, None] + (first + rows)).reshape(-1))
        return broken, np.concatenate(kept), np.concatenate(places)

    def arrived(self, places: Places) -> int:
        """Mark these rows as arrived; return how many are new, as a retried chunk repeats some."""
        new = len(places) - int(np.count_nonzero(self._there[places]))
        self._there[places] = True
        return new
