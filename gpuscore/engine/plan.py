"""The plan of a request: the items that are computed, and the rows of the answer that each gives.

An item that repeats an earlier one is not computed again. Nodes of labels of several tokens
(`types/request.py`) become items of one token each, which continue their item. Such a *family*, an
item with all its descendants, is computed in one batch. A node of a family that does not fit a
batch is a whole prompt instead: the item's tokens again, and those down to the node.

A beginning that many items share becomes an item of its own, which they continue. For that, items
are sorted, so that those with a common beginning are neighbours. It may again continue another (a
radix tree; Morrison, 1968). If every position is scored, a beginning is shared as far as the labels
are equal, too, and keeps them: its rows are computed once for all items that begin so.

A shared beginning costs one more pass of attention over all rows below it. A bench, whose figures
are in bench/LOG.md, shows this to cost about as much as a token for every 14 rows.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

import numpy as np

from gpuscore.types.batch import NO_TOKENS, BackendLimits, Int32Array, common_prefix, sorted_order
from gpuscore.types.request import LabelTrie, ScoreRequest, cut_for_labels, fits_batch

QUERY = -1  # in place of an item, where the query's own rows are meant
LEAST = 4  # tokens of a shared beginning
SAVED = 16  # tokens that it saves at least ...
ROWS_PER_TOKEN = 8  # ... and at least one for this many rows below it
MAX_DEPTH = 8  # levels of them below the query; each costs a pass over its descendants
# A family that does not fit the rest of a batch leaves it unfilled, and one that is cut in two
# computes its beginning twice.
FAMILIES_PER_BATCH = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """The items that are computed for a request, as trees, and where their rows belong.

    Items stand in preorder, each after its parent and before the next item that is not its
    descendant. An item without labels is not scored.

    The answer has a row for each of the caller's items, or for each item and then each of its
    nodes; with `every_position` one for each scored token, those of the query first.

    Attributes:
        label_tokens: of the items' tokens, those that belong to labels, not to a prompt.
    """

    request: ScoreRequest
    query_ids: Int32Array  # [cut]
    item_ids: tuple[Int32Array, ...]  # each [>= 1]
    label_ids: tuple[Int32Array, ...]  # one per item, each [>= 0]
    parents: list[int] | None = None  # of each item, -1 = the query; None = all the query
    rows: Sequence[Sequence[int]] | None = None  # of each item, see `rows_of`; None = its number
    label_tokens: int = 0

    def rows_of(self, item: int) -> Sequence[int]:
        """Return the rows of the answer that an item's row is, or its first row; none if it is not
        scored."""
        if item == QUERY:
            return (0,)
        return (item,) if self.rows is None else self.rows[item]

    @property
    def rows_per_item(self) -> int:
        return 1 if self.request.trie is None else self.request.trie.num_rows

    @property
    def num_rows(self) -> int:
        """Number of rows of the answer."""
        return self.request.num_rows * self.rows_per_item

    @property
    def num_tokens(self) -> int:
        """Tokens to compute if nothing is cached."""
        return len(self.query_ids) + sum(map(len, self.item_ids))

    def callers_item(self, item: int) -> int:
        """Return the caller's item to which an item's row belongs; the first one of several."""
        if item == QUERY:
            return 0
        row = min(self.rows_of(item))
        if not self.request.every_position:
            return row // self.rows_per_item
        return max(0, bisect(_first_rows(self.request), row) - 1)

    def families(self) -> list[range]:
        """Return the items of each family, in order."""
        if self.parents is None:
            return [range(item, item + 1) for item in range(len(self.item_ids))]
        heads = [item for item, parent in enumerate(self.parents) if parent < 0]
        return [range(start, stop) for start, stop in pairwise([*heads, len(self.parents)])]


def plan_items(
    request: ScoreRequest, limits: BackendLimits, parts: int = FAMILIES_PER_BATCH
) -> Plan:
    """Return the plan of a request.

    Args:
        parts: families with shared beginnings that fit a batch together. To compute a row of every
            position twice costs more than to leave a batch unfilled, so such a family may fill one.
    """
    query, items = cut_for_labels(request, limits)
    alike = len({item[:LEAST].tobytes() for item in items}) < len(items)
    if not (alike or request.trie is not None or request.every_position):
        return Plan(request, query, items, request.label_ids)
    heads = _heads(request, items, limits)
    tree = None
    # With --deterministic bits depend on what is a segment.
    if (alike or len(heads) > len(items)) and not limits.deterministic_chunk:
        parts = 1 if request.every_position else parts
        tree = _shared(request, heads, limits.max_tokens // parts)
    if tree is None:
        if request.trie is None and len(heads) == len(items) and not request.every_position:
            return Plan(request, query, items, request.label_ids)
        tree = _Tree(request, heads)
        for head in heads:
            tree.append(head)
    parents = tree.parents if max(tree.parents) >= 0 else None
    items, labels = tuple(tree.items), tuple(tree.labels)
    made = Plan(request, query, items, labels, parents=parents, rows=tree.rows)
    if request.trie is None:
        return made
    # If a node is a whole prompt, the item's tokens stand in the plan twice.
    every = sum(map(len, made.item_ids))
    own = [len(head.tokens) for head in heads if head.is_item]
    prompts = min(sum(own), every - len(own) * request.trie.num_nodes)
    return replace(made, label_tokens=every - prompts)


def _equal_items(request: ScoreRequest) -> list[list[int]]:
    """Return the places of each different item of a request, in order of the first ones.

    Items are equal if tokens and labels are. With `every_position` all are different: their equal
    beginnings are shared.
    """
    if len(request.item_ids) < 2 or request.every_position:
        return [[item] for item in range(len(request.item_ids))]
    labels = {id(ids): ids.tobytes() for ids in request.label_ids}  # usually one for all items
    places: dict[tuple[bytes, bytes], list[int]] = {}
    for number, (item, ids) in enumerate(zip(request.item_ids, request.label_ids, strict=True)):
        places.setdefault((item.tobytes(), labels[id(ids)]), []).append(number)
    return list(places.values())


class _Head(NamedTuple):
    """The first item of a family, before beginnings are shared."""

    tokens: Int32Array
    labels: Int32Array
    rows: list[int]  # of the answer
    nodes: Sequence[Int32Array] = ()  # the tokens of the nodes that continue it
    is_item: bool = True  # False for a node that is a whole prompt


def _heads(
    request: ScoreRequest, items: Sequence[Int32Array], limits: BackendLimits
) -> list[_Head]:
    trie = request.trie
    if request.every_position:
        first = ([row] for row in _first_rows(request))
        return [*map(_Head, items, request.label_ids, first)]
    if trie is None:
        equal = _equal_items(request)
        return [_Head(items[same[0]], request.label_ids[same[0]], same) for same in equal]
    heads: list[_Head] = []
    nodes = list(trie.tokens[:, None])
    for same in _equal_items(request):
        tokens, rows = items[same[0]], [trie.num_rows * item for item in same]
        if fits_batch(tokens, trie, limits):
            heads.append(_Head(tokens, trie.next_ids[0], rows, nodes))
            continue
        heads.append(_Head(tokens, trie.next_ids[0], rows))
        for number, path in enumerate(trie.paths(), 1):
            whole = np.concatenate((tokens, np.array(path, np.int32)))
            below = [row + number for row in rows]
            heads.append(_Head(whole, trie.next_ids[number], below, is_item=False))
    return heads


def _first_rows(request: ScoreRequest) -> list[int]:
    """Return the first row of each item of a request for every position."""
    query = 0 if request.query_labels is None else len(request.query_labels)
    return [*accumulate(map(len, request.item_ids[:-1]), initial=query)]


def _shared(request: ScoreRequest, heads: Sequence[_Head], max_tokens: int) -> "_Tree | None":
    """Return the tree of all items with their shared beginnings; None if nothing is worth sharing.

    Families get at most `max_tokens` tokens, so a beginning is computed again for each of several
    families that share it.
    """
    order = sorted_order([head.tokens for head in heads])
    tree = _Tree(request, [heads[place] for place in order])
    tree.append_all(max_tokens)
    unshared = sum(1 + len(head.nodes) for head in heads)
    return tree if len(tree.items) > unshared else None


class _Tree:
    """The items of a plan in preorder, while they are added; sorted items share beginnings."""

    def __init__(self, request: ScoreRequest, heads: Sequence[_Head]) -> None:
        self.items: list[Int32Array] = []
        self.labels: list[Int32Array] = []
        self.parents: list[int] = []
        self.rows: list[list[int]] = []
        self._heads, self._every = heads, request.every_position
        self._trie: LabelTrie | None = request.trie

    def append(self, head: _Head, depth: int = 0, parent: int = -1) -> None:
        """Add an item without its first `depth` tokens, and its nodes."""
        labels = head.labels[depth:] if self._every else head.labels
        self._add(head.tokens[depth:], labels, parent, self._at(head, depth))
        if self._trie is not None and head.nodes:
            first = len(self.items)
            self.items += head.nodes
            self.labels += self._trie.next_ids[1:]
            self.parents += (self._trie.parents + first).tolist()
            nodes = range(1, self._trie.num_rows)
            self.rows += [[row + number for row in head.rows] for number in nodes]

    def _at(self, head: _Head, depth: int) -> list[int]:
        """Return the rows that a head's token after its first `depth` ones is first in."""
        return [row + depth for row in head.rows] if self._every else head.rows

    def _add(self, tokens: Int32Array, labels: Int32Array, parent: int, rows: list[int]) -> None:
        self.items.append(tokens)
        self.labels.append(labels)
        self.parents.append(parent)
        self.rows.append(rows)

    def append_all(self, max_tokens: int) -> None:
        """Add all items, which are sorted; neighbours that share a beginning become families."""
        tokens = [head.tokens for head in self._heads]
        self._lengths, self._common = [*map(len, tokens)], _common(tokens)
        if self._every:
            labels = _common([head.labels for head in self._heads])
            self._common = [*map(min, self._common, labels)]
        waiting = self._runs(0, len(self._heads), LEAST)[::-1]
        own = [0, *accumulate(map(sub, self._lengths, self._common))]
        while waiting:
            start, stop = waiting.pop()
            kept = len(self.items)
            # No tree of a run has fewer tokens than those that its items do not share.
            least = self._common[start] + own[stop] - own[start]
            if stop - start == 1 or least <= max_tokens:
                self._append_run(start, stop)
                if stop - start == 1 or sum(map(len, self.items[kept:])) <= max_tokens:
                    continue
                for part in (self.items, self.labels, self.parents, self.rows):
                    del part[kept:]
            middle = (start + stop) // 2
            waiting += [(middle, stop), (start, middle)]

    def _runs(self, start: int, stop: int, least: int) -> list[tuple[int, int]]:
        """Divide sorted items where neighbours share fewer than `least` first tokens."""
        common = self._common
        cuts = [place for place in range(start + 1, stop) if common[place] < least]
        return [*pairwise([start, *cuts, stop])]

    def _append_run(self, start: int, stop: int) -> None:
        """Add the tree of a run of sorted items."""
        waiting = [(start, stop, 0, -1, 0)]  # with the tokens and beginnings above it, and the last
        while waiting:
            start, stop, depth, parent, level = waiting.pop()
            if stop - start == 1:
                self.append(self._heads[start], depth, parent)
                continue
            shared = self._shared_tokens(start, stop)
            if level == MAX_DEPTH:
                parts = [(place, place + 1) for place in range(start, stop)]
            elif self._pays(start, stop, depth, shared):
                self._append_beginning(start, stop, slice(depth, shared), parent)
                depth, parent, level = shared, len(self.items) - 1, level + 1
                parts = self._runs(start, stop, depth + LEAST)
            else:  # fewer neighbours may share more
                parts = self._runs(start, stop, min(self._common[start + 1 : stop]) + 1)
            waiting += [(*part, depth, parent, level) for part in reversed(parts)]

    def _pays(self, start: int, stop: int, depth: int, shared: int) -> bool:
        """True if computing the tokens from `depth` to `shared` once is worth a segment."""
        count = stop - start
        saved = (count - 1) * (shared - depth)
        below = sum(self._lengths[start:stop]) - count * shared
        return shared - depth >= LEAST and saved >= SAVED and saved * ROWS_PER_TOKEN >= below

    def _shared_tokens(self, start: int, stop: int) -> int:
        """Count the tokens that sorted items share; each item keeps a last token of its own."""
        return min(*self._common[start + 1 : stop], min(self._lengths[start:stop]) - 1)

    def _append_beginning(self, start: int, stop: int, part: slice, parent: int) -> None:
        """Add these tokens, which a run of sorted items shares."""
        head, labels, rows = self._heads[start], NO_TOKENS, list[int]()
        if self._every:
            labels = head.labels[part]
            for other in self._heads[start:stop]:
                rows += self._at(other, part.start)
        self._add(head.tokens[part], labels, parent, rows)


def _common(sequences: Sequence[Int32Array]) -> list[int]:
    """Return how many first tokens each sequence shares with the one before it."""
    return [0, *map(common_prefix, sequences, sequences[1:])]
