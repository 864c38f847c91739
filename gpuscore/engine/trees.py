"""Parts of a request that are computed once: equal items, and prefixes that some items share.

Items are sorted, so that those with a common beginning are neighbours. A beginning that pays
becomes an item of its own without labels, which they continue; it may again continue another (a
radix tree; Morrison, 1968). If every position is scored, a beginning is shared as far as the labels
are equal, too, and keeps them: its rows are computed once for all items that begin so.

Items may have descendants already, as the nodes of labels are; these stay below them.

A prefix costs one more pass of attention over all rows below it. A bench, whose
figures are in bench/LOG.md, shows this to cost about as much as a token for every 14 rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from gpuscore.types.batch import NO_TOKENS, Int32Array, common_prefix, sorted_order
from gpuscore.types.request import ScoreRequest, ScoreResult

LEAST = 4  # tokens of a prefix
SAVED = 16  # tokens that a prefix saves at least ...
ROWS_PER_TOKEN = 8  # ... and at least one for this many rows below it
MAX_DEPTH = 8  # levels of prefixes below the query; each costs a pass over its descendants


@dataclass(frozen=True, slots=True)
class SharedItems:
    """A request with its items in another form: prefixes of their own, or none."""

    request: ScoreRequest
    origin: list[int]  # of each item: the item of the first request, -1 = a prefix


def share_prefixes(request: ScoreRequest, max_tokens: int) -> SharedItems | None:
    """Return the tree of a request's items; None if nothing is worth sharing.

    Families get at most `max_tokens` tokens, so a prefix is computed again for each of several
    families that share it.
    """
    if not _may_share(request):
        return None
    tree = _Tree(request, max_tokens)
    tree.add_all()
    if -1 not in tree.origin:
        return None
    parents, items = np.array(tree.parents, np.int32), tuple(tree.items)
    made = replace(request, item_ids=items, label_ids=tuple(tree.labels), parents=parents)
    return SharedItems(made, tree.origin)


def without_trees(request: ScoreRequest) -> SharedItems | None:
    """Return a request of whole prompts in place of a tree of items; None if it is no tree."""
    if request.parents is None:
        return None
    prompts: list[Int32Array] = []
    for item, parent in zip(request.item_ids, request.parents.tolist(), strict=True):
        prompts.append(np.concatenate((prompts[parent], item)) if parent >= 0 else item)
    scored = [item for item, labels in enumerate(request.label_ids) if len(labels)]
    made = replace(
        request,
        item_ids=tuple(prompts[item] for item in scored),
        label_ids=tuple(request.label_ids[item] for item in scored),
        parents=None,
    )
    return SharedItems(made, scored)


def _may_share(request: ScoreRequest) -> bool:
    """True if two items share more than their first LEAST tokens; cheap if no items do."""
    heads = [item[:LEAST].tobytes() for item in _heads(request) if len(item) > LEAST]
    return len(set(heads)) < len(heads)


def _heads(request: ScoreRequest) -> Sequence[Int32Array]:
    """Return the first item of each family."""
    if request.parents is None:
        return request.item_ids
    return [request.item_ids[item] for item in np.flatnonzero(request.parents < 0).tolist()]


class _Tree:
    """The items of a tree in preorder, while it grows."""

    def __init__(self, request: ScoreRequest, max_tokens: int) -> None:
        self.items: list[Int32Array] = []
        self.labels: list[Int32Array] = []
        self.parents: list[int] = []
        self.origin: list[int] = []
        heads = _heads(request)
        self._request, self._families = request, request.families()
        self._order = sorted_order(heads)
        self._sorted = [heads[i] for i in self._order]
        self._lengths = np.array([*map(len, self._sorted)], np.int64)
        self._common = np.array([0, *map(common_prefix, self._sorted, self._sorted[1:])], np.int64)
        if request.every_position:
            labels = [request.label_ids[i] for i in self._order]
            same = np.array([0, *map(common_prefix, labels, labels[1:])], np.int64)
            self._common = np.minimum(self._common, same)
        self._max_tokens = max_tokens

    def add_all(self) -> None:
        """Add all items; runs of neighbours that share a prefix become families."""
        for start, stop in self._runs(0, len(self._sorted), LEAST):
            self._add_families(start, stop)

    def _runs(self, start: int, stop: int, least: int) -> Iterator[tuple[int, int]]:
        """Divide sorted items where neighbours share fewer than `least` first tokens."""
        cuts = np.flatnonzero(self._common[start + 1 : stop] < least) + start + 1
        bounds = [start, *cuts.tolist(), stop]
        yield from zip(bounds, bounds[1:], strict=False)

    def _add_families(self, start: int, stop: int) -> None:
        waiting = [(start, stop)]
        while waiting:
            start, stop = waiting.pop()
            kept = len(self.items)
            self._add(start, stop)
            if stop - start > 1 and sum(map(len, self.items[kept:])) > self._max_tokens:
                for part in (self.items, self.labels, self.parents, self.origin):
                    del part[kept:]
                middle = (start + stop) // 2
                waiting += [(middle, stop), (start, middle)]

    def _add(self, start: int, stop: int) -> None:
        """Add the tree of a run of sorted items."""
        waiting = [(start, stop, 0, -1, 0)]  # with the tokens and prefixes above it, and the last
        while waiting:
            start, stop, depth, parent, level = waiting.pop()
            if stop - start == 1:
                self._append_family(start, depth, parent)
                continue
            shared = self._shared(start, stop)
            if level == MAX_DEPTH:
                parts = [(place, place + 1) for place in range(start, stop)]
            elif self._pays(start, stop, depth, shared):
                self._append_prefix(start, slice(depth, shared), parent)
                depth, parent, level = shared, len(self.items) - 1, level + 1
                parts = [*self._runs(start, stop, depth + LEAST)]
            else:  # fewer neighbours may share more
                parts = [*self._runs(start, stop, int(self._common[start + 1 : stop].min()) + 1)]
            waiting += [(*part, depth, parent, level) for part in reversed(parts)]

    def _pays(self, start: int, stop: int, depth: int, shared: int) -> bool:
        """True if computing the tokens from `depth` to `shared` once is worth a segment."""
        count = stop - start
        saved = (count - 1) * (shared - depth)
        below = int(self._lengths[start:stop].sum()) - count * shared
        return shared - depth >= LEAST and saved >= SAVED and saved * ROWS_PER_TOKEN >= below

    def _shared(self, start: int, stop: int) -> int:
        """Count the tokens that sorted items share; each item keeps a last token of its own."""
        common = int(self._common[start + 1 : stop].min())
        return min(common, int(self._lengths[start:stop].min()) - 1)

    def _append_family(self, place: int, depth: int, parent: int) -> None:
        """Add a sorted item without its first `depth` tokens, and its descendants."""
        head, *others = self._families[self._order[place]]
        shift, labels = len(self.items) - head, self._request.label_ids[head]
        if self._request.every_position:
            labels = labels[depth:]
        self._append(self._sorted[place][depth:], labels, parent, head)
        for item in others:
            assert self._request.parents is not None  # noqa: S101  (there are descendants)
            above = int(self._request.parents[item]) + shift
            tokens, labels = self._request.item_ids[item], self._request.label_ids[item]
            self._append(tokens, labels, above, item)

    def _append_prefix(self, place: int, part: slice, parent: int) -> None:
        """Add these tokens of a sorted item as a prefix."""
        labels = NO_TOKENS
        if self._request.every_position:
            labels = self._request.label_ids[self._order[place]][part]
        self._append(self._sorted[place][part], labels, parent, -1)

    def _append(self, tokens: Int32Array, labels: Int32Array, parent: int, origin: int) -> None:
        self.items.append(tokens)
        self.labels.append(labels)
        self.parents.append(parent)
        self.origin.append(origin)


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
        """Return the result of the caller's request, made from the result of `request`."""
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
    numbers: dict[tuple[bytes, bytes], int] = {}
    places = [
        numbers.setdefault((item.tobytes(), labels[id(ids)]), len(numbers))
        for item, ids in zip(request.item_ids, request.label_ids, strict=True)
    ]
    if len(numbers) == len(places):
        return None
    firsts = np.unique(places, return_index=True)[1].tolist()
    made = replace(
        request,
        item_ids=tuple(request.item_ids[i] for i in firsts),
        label_ids=tuple(request.label_ids[i] for i in firsts),
    )
    return DistinctItems(made, np.array(places, np.int32))
