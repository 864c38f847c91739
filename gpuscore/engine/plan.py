"""The plan of a request: the items that are computed, and the rows of the answer that each gives.

An item that repeats an earlier one is not computed again. Nodes of labels of several tokens
(`types/request.py`) become items of one token each, which continue their item. Such a *family*, an
item with all its descendants, is computed in one batch. A node of a family that does not fit a
batch is a whole prompt instead: the item's tokens again, and those down to the node.

A beginning that many items share becomes an item of its own, which they continue. For that, items
are sorted, so that those with a common beginning are neighbours. It may again continue another (a
radix tree; Morrison, 1968). If tokens before an item's last one are scored, a beginning is shared
as far as their labels are equal, too, and keeps them: its rows are computed once for all items that
begin so.

A shared beginning costs one more pass of attention over all rows below it. A bench, whose figures
are in bench/LOG.md, shows this to cost about as much as a token for every 14 rows.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    cut_for_labels,
    fits_batch,
    prompts_with_nodes,
)

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

    The answer has a row for each of the caller's items, or for each token that `readouts` name,
    those of the query first. With a trie each row is followed by those of its nodes.

    Attributes:
        reads: of each item, its tokens that are scored; None: the last ones of items with labels.
        label_tokens: of the items' tokens, those that belong to labels, not to a prompt.
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
        """Return the rows of the answer that an item's row is, or its first row; none if it is not
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
        """Return the caller's item to which an item's row belongs; the first one of several."""
        if item == QUERY:
            return 0
        row = min(self.rows_of(item)) // self.rows_per_token
        return max(0, bisect(self.request.first_rows, row) - 1)

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
        parts: families with shared beginnings that fit a batch together. To compute the rows of a
            beginning twice costs more than to leave a batch unfilled, so such a family may fill
            one.
    """
    query, items = cut_for_labels(request, limits)
    alike = len({item[:LEAST].tobytes() for item in items}) < len(items)
    plain = request.trie is None and request.readouts is None
    if plain and not alike:
        return Plan(request, query, items, request.label_ids)
    heads = _heads(request, items, limits)
    tree = None
    # With --deterministic bits depend on what is a segment.
    alone = limits.deterministic_chunk or (request.trie and request.readouts)
    if (alike or len(heads) > len(items)) and not alone:
        parts = parts if request.readouts is None else 1
        tree = _shared(request, heads, limits.max_tokens // parts)
    if tree is None:
        if plain and len(heads) == len(items):
            return Plan(request, query, items, request.label_ids)
        tree = _Tree(request, heads)
        for head in heads:
            tree.append(head)
    parents = tree.parents if max(tree.parents) >= 0 else None
    items, labels = tuple(tree.items), tuple(tree.labels)
    made = Plan(request, query, items, labels, parents=parents, rows=tree.rows)
    if request.trie is None:
        return made if request.readouts is None else replace(made, reads=tree.reads)
    # If a node is a whole prompt, the item's tokens stand in the plan twice.
    every = sum(map(len, made.item_ids))
    own = [head for head in heads if head.is_item]
    nodes = sum(1 if head.reads is None else len(head.reads.places) for head in own)
    prompts = min(sum(len(head.tokens) for head in own), every - nodes * request.trie.num_nodes)
    return replace(made, label_tokens=every - prompts)


def _equal_items(request: ScoreRequest) -> list[list[int]]:
    """Return the places of each different item of a request, in order of the first ones.

    Items are equal if tokens, labels and rows are.
    """
    if len(request.item_ids) < 2:
        return [[item] for item in range(len(request.item_ids))]
    labels = {id(ids): ids.tobytes() for ids in request.label_ids}  # usually one for all items
    read = request.readouts
    rows = [] if read is None else [*zip(read.places[1:], read.counts[1:], strict=True)]
    places: dict[tuple[bytes, ...], list[int]] = {}
    for number, (item, ids) in enumerate(zip(request.item_ids, request.label_ids, strict=True)):
        own = [part.tobytes() for part in rows[number]] if rows else ()
        places.setdefault((item.tobytes(), labels[id(ids)], *own), []).append(number)
    return list(places.values())


# Tokens, with their labels, rows of the answer and scored tokens.
_Part: TypeAlias = tuple[Int32Array, Int32Array, list[int], Rows]


class _Head(NamedTuple):
    """The first item of a family, before beginnings are shared."""

    tokens: Int32Array
    labels: Int32Array
    rows: list[int]  # of the answer, the first of each equal item
    nodes: Sequence[Int32Array] = ()  # the tokens of the nodes that continue each scored token
    is_item: bool = True  # False for a node that is a whole prompt
    reads: Rows | None = None  # the tokens that are scored; None = the last one

    def part(self, start: int, stop: int) -> _Part:
        """Return the tokens `start` to `stop` - 1 and what belongs to them."""
        tokens = self.tokens[start:stop]
        if self.reads is None:
            is_end = stop == len(self.tokens)
            return tokens, *((self.labels, self.rows) if is_end else (NO_TOKENS, [])), NO_ROWS
        reads, labels = self.reads.part(start, stop)
        before = self.reads.before(start)
        return tokens, self.labels[labels], [row + before for row in self.rows], reads

    def marks(self, numbers: dict[bytes, int]) -> Int32Array:
        """Return a number for each token: 0 if it is not scored, else the same for equal labels."""
        marks, reads = np.zeros(len(self.tokens), np.int32), self.reads or NO_ROWS
        if (reads.counts == 1).all():
            marks[reads.places] = 1 + self.labels
            return marks
        ends = np.cumsum(reads.counts).tolist()
        labels = [self.labels[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]
        marks[reads.places] = [numbers.setdefault(ids, -1 - len(numbers)) for ids in labels]
        return marks


def _heads(
    request: ScoreRequest, items: Sequence[Int32Array], limits: BackendLimits
) -> list[_Head]:
    trie, first = request.trie, request.first_rows
    reads = None if request.readouts is None else request.readouts.rows[1:]
    heads: list[_Head] = []
    for same in _equal_items(request):
        item = same[0]
        rows, read = [first[one] for one in same], None if reads is None else reads[item]
        if trie is None:
            heads.append(_Head(items[item], request.label_ids[item], rows, reads=read))
            continue
        prompts = prompts_with_nodes(request, item, items[item], limits)
        for number, tokens in enumerate(prompts):
            own = [trie.num_rows * (row + number) for row in rows]
            reads_all = read if len(prompts) == 1 else None
            heads += _with_nodes(tokens, own, trie, limits, reads=reads_all)
    return heads


def _with_nodes(
    tokens: Int32Array, rows: list[int], trie: LabelTrie, limits: BackendLimits, reads: Rows | None
) -> Iterator[_Head]:
    """Yield a head with the trie's nodes below its scored tokens, or those as whole prompts."""
    if fits_batch(tokens, trie, limits):
        yield _Head(tokens, trie.next_ids[0], rows, [*trie.tokens[:, None]], reads=reads)
        return
    yield _Head(tokens, trie.next_ids[0], rows)
    for number, path in enumerate(trie.paths(), 1):
        whole = np.concatenate((tokens, np.array(path, np.int32)))
        yield _Head(whole, trie.next_ids[number], [row + number for row in rows], is_item=False)


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
        self.reads: list[Rows] = []
        self._heads, self._read = heads, request.readouts is not None
        self._trie: LabelTrie | None = request.trie

    def append(self, head: _Head, depth: int = 0, parent: int = -1) -> None:
        """Add an item without its first `depth` tokens, and its nodes.

        An item with nodes below several tokens becomes a chain: each part ends with such a token,
        and its nodes and the next part continue it.
        """
        if self._trie is None or head.reads is None:
            self._add(parent, head.part(depth, len(head.tokens)))
            self._add_nodes(head, head.rows)
            return
        for number, place in enumerate(head.reads.places.tolist()):
            rows = [row + number * self._trie.num_rows for row in head.rows]
            self._add(parent, (head.tokens[depth : place + 1], head.labels, rows, NO_ROWS))
            depth, parent = place + 1, len(self.items) - 1
            self._add_nodes(head, rows)

    def _add_nodes(self, head: _Head, rows: list[int]) -> None:
        """Add the nodes that continue the last item, whose rows of the answer these are."""
        if self._trie is not None and head.nodes:
            first = len(self.items)
            self.items += head.nodes
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
        """Add all items, which are sorted; neighbours that share a beginning become families."""
        tokens = [head.tokens for head in self._heads]
        self._lengths, self._common = [*map(len, tokens)], _common(tokens)
        if self._read:
            numbers: dict[bytes, int] = {}
            marks = _common([head.marks(numbers) for head in self._heads])
            self._common = [*map(min, self._common, marks)]
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
                for part in (self.items, self.labels, self.parents, self.rows, self.reads):
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
        heads = self._heads[start : stop if self._read else start + 1]  # others have no rows there
        parts = [head.part(part.start, part.stop) for head in heads]
        tokens, labels, _, reads = parts[0]
        self._add(parent, (tokens, labels, [row for own in parts for row in own[2]], reads))


def _common(sequences: Sequence[Int32Array]) -> list[int]:
    """Return how many first tokens each sequence shares with the one before it."""
    return [0, *map(common_prefix, sequences, sequences[1:])]
