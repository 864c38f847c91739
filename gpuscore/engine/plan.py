"""The plan of a request: the items that are computed, and the rows of the answer that each gives.

An item that repeats an earlier one is not computed again. Nodes of labels of several tokens
(`types/request.py`) become items of one token each, which continue their item. An item with all its
descendants is a *tree* and is computed in one batch. If a tree does not fit a batch, each node
becomes a whole prompt instead: the item's tokens again, then those down to the node.

A prefix that many items share becomes an item of its own, which they continue. For that, items are
sorted, so that those with a common prefix are neighbours. A prefix may continue another one (a
radix tree; Morrison, 1968). If tokens before an item's last one are scored, items share a prefix
only as far as these tokens' labels are equal, too. The prefix's rows are then computed once for all
of these items.

A shared prefix costs one more pass of attention over all rows below it. According to bench/LOG.md,
this takes as long as about one token for every 14 rows.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple, TypeAlias

import numpy as np

from gpuscore.types.batch import (
    NO_ROWS,
    NO_TOKENS,
    BackendLimits,
    Int32Array,
    Rows,
    common_prefix,
    sorted_order,
)
from gpuscore.types.request import (
    LabelTrie,
    ScoreRequest,
    fits_batch,
    prompts_with_nodes,
    split_for_labels,
)

QUERY = -1  # in place of an item: the query's own rows
# A prefix of items is shared if it has MIN_SHARED tokens, saves MIN_SAVED tokens, and saves one
# token for every ROWS_PER_SAVED_TOKEN rows below it.
MIN_SHARED = 4
MIN_SAVED = 16
ROWS_PER_SAVED_TOKEN = 8
MAX_DEPTH = 8  # shared prefixes below each other; each costs a pass over its descendants
# Trees are divided until so many fit a batch. A tree that does not fit the rest of a batch leaves
# it unfilled, but a divided tree computes its prefix twice.
TREES_PER_BATCH = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """The items that are computed for a request, as trees, and where their rows belong.

    Items stand in preorder, each after its parent and before the next item that is not its
    descendant. An item without labels is not scored.

    The answer has a row for each of the caller's items, or for each token that `readouts` name,
    those of the query first. With a trie each row is followed by those of its nodes.

    Attributes:
        reads: the scored tokens of each item; None: the last ones of items with labels.
        label_tokens: number of the items' tokens that belong to labels, not to a prompt.
    """

    request: ScoreRequest
    query_ids: Int32Array
    item_ids: tuple[Int32Array, ...]  # each [>= 1]
    label_ids: tuple[Int32Array, ...]  # one per item, each [>= 0]
    parents: list[int] | None = None  # of each item, -1 = the query; None = all the query
    rows: Sequence[Sequence[int]] | None = None  # of each item, see `rows_of`; None = its number
    label_tokens: int = 0
    reads: Sequence[Rows] | None = None

    def rows_of(self, item: int) -> Sequence[int]:
        """Return the rows of the answer that an item's first row becomes; none if the item is not
        scored."""
        if item == QUERY:
            return (0,)
        return (item,) if self.rows is None else self.rows[item]

    @property
    def rows_per_token(self) -> int:
        """Number of rows of the answer for each scored token."""
        return 1 if self.request.trie is None else self.request.trie.num_rows

    @property
    def num_rows(self) -> int:
        """Number of rows of the answer."""
        return self.request.num_rows * self.rows_per_token

    @property
    def num_tokens(self) -> int:
        """Tokens to compute if nothing is cached."""
        return len(self.query_ids) + sum(map(len, self.item_ids))

    def callers_item(self, item: int) -> int:
        """Return the caller's item that gets an item's rows; if several do, the first."""
        if item == QUERY:
            return 0
        row = min(self.rows_of(item)) // self.rows_per_token
        return max(0, bisect(self.request.first_rows, row) - 1)

    def trees(self) -> list[range]:
        """Return the items of each tree, in order."""
        if self.parents is None:
            return [range(item, item + 1) for item in range(len(self.item_ids))]
        firsts = [item for item, parent in enumerate(self.parents) if parent < 0]
        return [range(start, stop) for start, stop in pairwise([*firsts, len(self.parents)])]


def plan_items(
    request: ScoreRequest, limits: BackendLimits, trees_per_batch: int = TREES_PER_BATCH
) -> Plan:
    """Return the plan of a request.

    Args:
        trees_per_batch: how many trees with shared prefixes must fit a batch together. With
            readouts it is 1: computing a prefix's scored rows twice costs more than leaving a
            batch unfilled.
    """
    query, items = split_for_labels(request, limits)
    may_share = len({item[:MIN_SHARED].tobytes() for item in items}) < len(items)
    is_plain = request.trie is None and request.readouts is None
    if is_plain and not may_share:
        return Plan(request, query, items, request.label_ids)
    different = _different_items(request, items, limits)
    builder = None
    # With --deterministic, bits would depend on where shared prefixes end.
    must_not_share = limits.deterministic_chunk or (request.trie and request.readouts)
    if (may_share or len(different) > len(items)) and not must_not_share:
        if request.readouts is not None:
            trees_per_batch = 1
        builder = _shared_plan(request, different, limits.max_tokens // trees_per_batch)
    if builder is None:
        if is_plain and len(different) == len(items):
            return Plan(request, query, items, request.label_ids)
        builder = _PlanBuilder(request, different)
        for item in different:
            builder.append(item)
    trie = request.trie
    return Plan(
        request,
        query,
        tuple(builder.items),
        tuple(builder.labels),
        parents=builder.parents if max(builder.parents) >= 0 else None,
        rows=builder.rows,
        label_tokens=0 if trie is None else _label_tokens(builder.items, trie, different),
        reads=builder.reads if trie is None and request.readouts is not None else None,
    )


def _label_tokens(
    items: Sequence[Int32Array], trie: LabelTrie, different: Sequence["_Item"]
) -> int:
    """Return how many tokens of a plan's items belong to labels.

    If a node is a whole prompt, the item's tokens stand in the plan twice.
    """
    computed = sum(map(len, items))
    prompts = [item for item in different if not item.is_node]
    scored = sum(len(item.reads.places) or 1 for item in prompts)
    prompt_tokens = sum(len(item.tokens) for item in prompts)
    return computed - min(prompt_tokens, computed - scored * trie.num_nodes)


def _equal_items(request: ScoreRequest) -> list[list[int]]:
    """Return the places of each different item of a request, in order of the first ones.

    Items are equal if tokens, labels and rows are.
    """
    if len(request.item_ids) < 2:
        return [[item] for item in range(len(request.item_ids))]
    labels = {id(ids): ids.tobytes() for ids in request.label_ids}  # usually one for all items
    places: dict[tuple[bytes, ...], list[int]] = {}
    for number, (item, ids) in enumerate(zip(request.item_ids, request.label_ids, strict=True)):
        key: tuple[bytes, ...] = (item.tobytes(), labels[id(ids)])
        if rows := request.rows_of(number):
            key += (rows.places.tobytes(), rows.counts.tobytes())
        places.setdefault(key, []).append(number)
    return list(places.values())


# Tokens, with their labels, rows of the answer and scored tokens.
_Part: TypeAlias = tuple[Int32Array, Int32Array, list[int], Rows]


class _Item(NamedTuple):
    """A different item of a request, with its nodes, before prefixes are shared."""

    tokens: Int32Array
    labels: Int32Array
    rows: list[int]  # of the answer: the first row of each equal item
    nodes: Sequence[Int32Array] = ()  # the tokens of the nodes that continue each scored token
    is_node: bool = False  # True for a node that is a whole prompt
    reads: Rows = NO_ROWS  # the tokens that are scored; none = the last one

    def part(self, start: int, stop: int) -> _Part:
        """Return the tokens `start` to `stop` - 1 and what belongs to them."""
        tokens = self.tokens[start:stop]
        if self.reads:
            reads = self.reads.part(start, stop)
            before = self.reads.before(start)
            return tokens, reads.labels, [row + before for row in self.rows], reads
        if stop == len(self.tokens):
            return tokens, self.labels, self.rows, NO_ROWS
        return tokens, NO_TOKENS, [], NO_ROWS

    def marks(self, numbers: dict[bytes, int]) -> Int32Array:
        """Return a number for each token: 0 if it is not scored, else the same for equal labels."""
        marks = np.zeros(len(self.tokens), np.int32)
        places, counts, labels = self.reads
        if (counts == 1).all():
            marks[places] = 1 + labels
            return marks
        of_rows = np.split(labels, np.cumsum(counts[:-1]))
        marks[places] = [numbers.setdefault(ids.tobytes(), -1 - len(numbers)) for ids in of_rows]
        return marks


def _different_items(
    request: ScoreRequest, items: Sequence[Int32Array], limits: BackendLimits
) -> list[_Item]:
    """Return each different item once; with labels of several tokens also with their nodes."""
    trie = request.trie
    first_rows = request.first_rows
    different: list[_Item] = []
    for equal in _equal_items(request):
        item = equal[0]
        rows = [first_rows[number] for number in equal]
        reads = request.rows_of(item)
        if trie is None:
            labels = request.label_ids[item]
            different.append(_Item(items[item], labels, rows, reads=reads))
            continue
        prompts = prompts_with_nodes(request, item, items[item], limits)
        for number, tokens in enumerate(prompts):
            own = [trie.num_rows * (row + number) for row in rows]
            fits = fits_batch(tokens, trie, limits)
            nodes = [*trie.tokens[:, None]] if fits else ()
            read = reads if fits and len(prompts) == 1 else NO_ROWS
            different.append(_Item(tokens, trie.next_ids[0], own, nodes, reads=read))
            for node, path in enumerate(() if fits else trie.paths(), 1):
                whole = np.concatenate((tokens, np.array(path, np.int32)))
                labels = trie.next_ids[node]
                different.append(_Item(whole, labels, [row + node for row in own], is_node=True))
    return different


def _shared_plan(
    request: ScoreRequest, different: Sequence[_Item], max_tokens: int
) -> "_PlanBuilder | None":
    """Return the tree of all items with their shared prefixes; None if nothing is worth sharing.

    Trees get at most `max_tokens` tokens, so a prefix is computed again for each of several
    trees that share it.
    """
    order = sorted_order([item.tokens for item in different])
    builder = _PlanBuilder(request, [different[place] for place in order])
    builder.append_all(max_tokens)
    unshared = sum(1 + len(item.nodes) for item in different)
    return builder if len(builder.items) > unshared else None


class _PlanBuilder:
    """Collects the items of a plan in preorder; sorted items share prefixes."""

    def __init__(self, request: ScoreRequest, different: Sequence[_Item]) -> None:
        self.items: list[Int32Array] = []
        self.labels: list[Int32Array] = []
        self.parents: list[int] = []
        self.rows: list[list[int]] = []
        self.reads: list[Rows] = []
        self._different = different
        self._has_readouts = request.readouts is not None
        self._trie: LabelTrie | None = request.trie

    def append(self, item: _Item, depth: int = 0, parent: int = -1) -> None:
        """Add an item without its first `depth` tokens, and its nodes.

        An item with nodes below several tokens becomes a chain: each part ends with such a token,
        and its nodes and the next part continue it.
        """
        if self._trie is None or not item.reads:
            self._add(parent, item.part(depth, len(item.tokens)))
            self._add_nodes(item, item.rows)
            return
        for number, place in enumerate(item.reads.places.tolist()):
            rows = [row + number * self._trie.num_rows for row in item.rows]
            self._add(parent, (item.tokens[depth : place + 1], item.labels, rows, NO_ROWS))
            depth = place + 1
            parent = len(self.items) - 1
            self._add_nodes(item, rows)

    def _add_nodes(self, item: _Item, rows: list[int]) -> None:
        """Add the nodes that continue the last item; `rows` are that item's rows of the answer."""
        if self._trie is not None and item.nodes:
            first = len(self.items)
            self.items += item.nodes
            self.labels += self._trie.next_ids[1:]
            self.parents += (self._trie.parents + first).tolist()
            nodes = range(1, self._trie.num_rows)
            self.rows += [[row + number for row in rows] for number in nodes]
            self.reads += [NO_ROWS] * len(nodes)

    def _add(self, parent: int, part: _Part) -> None:
        tokens, labels, rows, reads = part
        self.items.append(tokens)
        self.labels.append(labels)
        self.parents.append(parent)
        self.rows.append(rows)
        self.reads.append(reads)

    def append_all(self, max_tokens: int) -> None:
        """Add all items, which are sorted; neighbours that share a prefix become trees."""
        tokens = [item.tokens for item in self._different]
        self._lengths = [*map(len, tokens)]
        self._common = _common(tokens)
        if self._has_readouts:
            numbers: dict[bytes, int] = {}
            marks = _common([item.marks(numbers) for item in self._different])
            self._common = [*map(min, self._common, marks)]
        unshared = [0, *accumulate(map(sub, self._lengths, self._common))]
        runs = self._runs(0, len(self._different), MIN_SHARED)[::-1]
        while runs:
            start, stop = runs.pop()
            count = len(self.items)
            # The tree of a run has at least the tokens that its items do not share.
            least = self._common[start] + unshared[stop] - unshared[start]
            if stop - start == 1 or least <= max_tokens:
                self._append_run(start, stop)
                if stop - start == 1 or sum(map(len, self.items[count:])) <= max_tokens:
                    continue
                for column in (self.items, self.labels, self.parents, self.rows, self.reads):
                    del column[count:]
            middle = (start + stop) // 2
            runs += [(middle, stop), (start, middle)]

    def _runs(self, start: int, stop: int, min_shared: int) -> list[tuple[int, int]]:
        """Divide sorted items where neighbours share fewer than `min_shared` first tokens."""
        common = self._common
        borders = [place for place in range(start + 1, stop) if common[place] < min_shared]
        return [*pairwise([start, *borders, stop])]

    def _append_run(self, start: int, stop: int) -> None:
        """Add the tree of a run of sorted items."""
        # Each run with the tokens above it, their last item, and the number of prefixes above it.
        runs = [(start, stop, 0, -1, 0)]
        while runs:
            start, stop, depth, parent, level = runs.pop()
            if stop - start == 1:
                self.append(self._different[start], depth, parent)
                continue
            # Each item keeps a last token of its own.
            shared = min(*self._common[start + 1 : stop], min(self._lengths[start:stop]) - 1)
            if level == MAX_DEPTH:
                parts = [(place, place + 1) for place in range(start, stop)]
            elif self._is_worth_sharing(start, stop, depth, shared):
                self._append_prefix(start, stop, slice(depth, shared), parent)
                depth = shared
                parent = len(self.items) - 1
                level += 1
                parts = self._runs(start, stop, depth + MIN_SHARED)
            else:  # fewer neighbours may share more
                parts = self._runs(start, stop, min(self._common[start + 1 : stop]) + 1)
            runs += [(*part, depth, parent, level) for part in reversed(parts)]

    def _is_worth_sharing(self, start: int, stop: int, depth: int, shared: int) -> bool:
        """True if computing the tokens from `depth` to `shared` once is worth a segment."""
        count = stop - start
        saved = (count - 1) * (shared - depth)
        rows_below = sum(self._lengths[start:stop]) - count * shared
        if shared - depth < MIN_SHARED or saved < MIN_SAVED:
            return False
        return saved * ROWS_PER_SAVED_TOKEN >= rows_below

    def _append_prefix(self, start: int, stop: int, part: slice, parent: int) -> None:
        """Add the tokens `part`, which a run of sorted items shares, with all these items' rows."""
        # Without readouts no row is in a prefix, and one item will do.
        items = self._different[start : stop if self._has_readouts else start + 1]
        parts = [item.part(part.start, part.stop) for item in items]
        tokens, labels, _, reads = parts[0]
        rows = [row for _, _, item_rows, _ in parts for row in item_rows]
        self._add(parent, (tokens, labels, rows, reads))


def _common(sequences: Sequence[Int32Array]) -> list[int]:
    """Return how many first tokens each sequence shares with the one before it."""
    return [0, *map(common_prefix, sequences, sequences[1:])]
