"""The engine's input and output: `ScoreRequest`, with its labels, and `ScoreResult`.

They are msgspec structs, because processes send them to each other unchanged
(`processes/worker/wire.py`). `msgspec.structs.replace` makes a changed copy, and checks it, too.

A label of several tokens is scored along a trie. All tokens of a label except its last are *nodes*;
labels with a common beginning share nodes. The item's row gives the distribution of the labels'
first tokens, a node's row the distribution of the tokens after that node:

    labels [12, 7, 5], [12, 8] and [9]         item          row: 12 and 9
                                                 12          row: 7 and 8
                                                   7         row: 5
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from gpuscore.types.batch import (
    NO_ROWS,
    BackendLimits,
    Float32Array,
    Float32Rows,
    Float64Array,
    Int32Array,
    Int32Rows,
    Rows,
    int32_array,
)


class LabelTrie(Struct, frozen=True, dict=True, array_like=True):
    """The labels of a request, if any label has several tokens. All items have these labels.

    With K nodes an item has 1 + K rows: its own row, then the nodes' rows, in preorder. `next_ids`
    lists, for each row, the labels' next tokens: C tokens in all.

    Attributes:
        sequences: the tokens of the L labels.
        tokens: the nodes' tokens.
        parents: the index of each node's parent node; -1 = the item.
        next_ids: for each row, the labels' next tokens.
        places: the index in `next_ids` of each label's tokens, one label after the other.
        lengths: the number of tokens of each label.
        counted: the labels that `label_mass` adds up. Equal labels count once. Labels that begin
            with another label are left out, because its probability contains theirs.

    Raises:
        ValueError: there is no label, or a label without tokens.
    """

    sequences: tuple[tuple[int, ...], ...]
    # Computed from the sequences. These are not fields, so they are not sent.
    tokens: ClassVar[Int32Array]  # [K]
    parents: ClassVar[Int32Array]  # [K]
    next_ids: ClassVar[tuple[Int32Array, ...]]  # [1 + K]
    places: ClassVar[Int32Array]  # [sum of lengths]
    lengths: ClassVar[Int32Array]  # [L]
    counted: ClassVar[Int32Array]  # [at most L]

    def __post_init__(self) -> None:
        if not self.sequences or not all(self.sequences):
            raise ValueError("there must be a label, and each label must have a token")
        columns: list[dict[int, int]] = [{}]  # for each row, the column of each next token
        lineage: list[tuple[int, ...]] = [()]  # for each row, its path from the item's row
        nodes: dict[tuple[int, int], int] = {}  # (parent row, token) -> row of that node
        steps: list[tuple[int, int]] = []  # for each token of each label, its row and column
        for *firsts, last in self.sequences:
            row = 0
            for token in firsts:
                steps.append((row, columns[row].setdefault(token, len(columns[row]))))
                parent = row
                row = nodes.setdefault((parent, token), len(columns))
                if row == len(columns):
                    columns.append({})
                    lineage.append((*lineage[parent], row))
            steps.append((row, columns[row].setdefault(last, len(columns[row]))))
        order = sorted(range(len(columns)), key=lineage.__getitem__)  # preorder
        place = {row: number for number, row in enumerate(order)}
        starts = np.cumsum([0, *(len(columns[row]) for row in order)])
        keys = [*nodes]
        preorder_keys = [keys[row - 1] for row in order[1:]]
        self.__dict__.update(
            tokens=int32_array([token for _, token in preorder_keys]),
            parents=int32_array([place[parent] - 1 for parent, _ in preorder_keys]),
            next_ids=tuple(int32_array([*columns[row]]) for row in order),
            places=int32_array([starts[place[row]] + column for row, column in steps]),
            lengths=int32_array([*map(len, self.sequences)]),
            counted=int32_array(_shortest(self.sequences)),
        )

    @classmethod
    def of(cls, sequences: Sequence[Int32Array]) -> "LabelTrie":
        return cls(tuple(tuple(ids.tolist()) for ids in sequences))

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows of each item: its own row and one per node."""
        return 1 + len(self.tokens)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest label."""
        return int(self.lengths.max())

    @property
    def first_ids(self) -> Int32Array:
        """The first token of each label, [L]."""
        return int32_array([sequence[0] for sequence in self.sequences])

    def paths(self) -> list[list[int]]:
        """Return for each node the tokens of the path from the item to it."""
        paths: list[list[int]] = []
        for token, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
        return paths

    def sums(self, logprobs: Float64Array) -> Float64Array:
        """Return the labels' log-probabilities [N, L], from those of the tokens [N, C]."""
        starts = np.cumsum(self.lengths) - self.lengths
        summed: Float64Array = np.add.reduceat(logprobs[:, self.places], starts, axis=1)
        return summed


def _shortest(sequences: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the indices of the labels that do not begin with another label; equal ones once."""
    first = {sequence: label for label, sequence in reversed([*enumerate(sequences)])}
    return [
        label
        for label, sequence in enumerate(sequences)
        if first[sequence] == label
        and not any(sequence[:end] in first for end in range(1, len(sequence)))
    ]


MAX_TOP = 20  # the largest `num_top` of a request


class Terms(NamedTuple):
    """When a request runs, and with which other requests it shares cached prefixes."""

    priority: int = 0  # lower runs first
    salt: str = ""  # only requests with the same salt find each other's cached prefixes
    deadline: float | None = None  # seconds on the engine's clock; then the request is dropped


class Readouts(Struct, frozen=True, eq=False, array_like=True, gc=False):
    """The scored rows of a request that scores other tokens than the last one of each item.

    The first entry is for the query, whose rows are computed once for all prompts; the others are
    for the N items.
    """

    places: Int32Rows  # [1 + N] the scored tokens, see `Rows`
    counts: Int32Rows  # [1 + N] the number of labels of each row
    query_labels: Int32Array

    @staticmethod
    def of(rows: Sequence[Rows]) -> "Readouts":
        """Return the read-outs of the query's rows, which come first, and of the items' rows."""
        places, counts, labels = zip(*rows, strict=True)
        return Readouts(places, counts, labels[0])


class ScoreRequest(Struct, frozen=True, eq=False, array_like=True, gc=False):
    """One request: every prompt is `query_ids + item_ids[i]`.

    `query_ids` holds the tokens that all prompts begin with. Each item has at least one token: its
    scored row is computed, never cached. `label_ids[i]` are the labels of the last token of
    `item_ids[i]`. With `readouts`, they are the labels of the item's scored rows, one row after the
    other.

    With `trie`, labels have several tokens, and are the same for all rows: `label_ids[i]` has their
    first tokens. A label's logit in the result is then the sum of its tokens' log-probabilities
    plus the log-sum-exp of the row, so that a label of one token has the model's own logit.

    Raises:
        ValueError: `readouts` or `trie` do not fit the tokens and labels, or `num_top` is over
            MAX_TOP.
    """

    query_ids: Int32Array  # may be empty
    item_ids: Int32Rows  # each [>= 1]
    label_ids: Int32Rows  # one per item, each [>= 1]
    need_lse: bool
    num_top: int = 0  # most probable tokens of every row, at most MAX_TOP
    priority: int = 0  # lower runs first
    salt: str = ""  # only requests with the same salt find each other's cached prefixes
    deadline: float | None = None  # seconds on the engine's clock; then the request is dropped
    readouts: Readouts | None = None  # None = the last token of each item
    trie: LabelTrie | None = None  # None = labels of one token

    def __post_init__(self) -> None:
        if not 0 <= self.num_top <= MAX_TOP:
            raise ValueError(f"{self.num_top} top tokens, the limit is {MAX_TOP}")
        if self.readouts is not None:
            self._check_readouts(self.readouts)
        if self.trie is not None:
            self._check_trie(self.trie)

    def _check_readouts(self, read: Readouts) -> None:
        runs = (self.query_ids, *self.item_ids)
        if not len(runs) == 1 + len(self.label_ids) == len(read.places) == len(read.counts):
            raise ValueError("readouts need an entry for the query and one for each item")
        for item, tokens in enumerate(runs, -1):
            places, counts, labels = self.rows_of(item)
            steps = np.diff(places, prepend=-1, append=len(tokens))
            if steps.min() < 1 or len(places) != len(counts):
                raise ValueError(
                    "readouts must name tokens in ascending order, with a count for each"
                )
            if counts.min(initial=1) < 1 or counts.sum() != len(labels):
                raise ValueError("the counts of the rows do not add up to the labels")

    def _check_trie(self, trie: LabelTrie) -> None:
        if not self.need_lse or self.num_top:
            raise ValueError("labels of several tokens need the log-sum-exp and exclude top tokens")
        first = trie.first_ids
        different = {id(ids): ids for ids in self.label_ids}  # usually one array for all items
        if not all(
            len(ids) % len(first) == 0 and (ids.reshape(-1, len(first)) == first).all()
            for ids in different.values()
        ):
            raise ValueError("the label ids are not the first tokens of the labels")
        if self.readouts is not None and len(self.readouts.query_labels):
            raise ValueError("labels of several tokens cannot score the query")

    @property
    def num_label_tokens(self) -> int:
        """Tokens of labels that are computed after the prompts; 0 if labels are single tokens."""
        return 0 if self.trie is None else self.trie.num_nodes * self.num_rows

    @property
    def row_labels(self) -> tuple[Int32Array, ...]:
        """The labels in the answer's order: the query's, if it is scored, then the items'."""
        read = self.readouts
        query = () if read is None or not len(read.query_labels) else (read.query_labels,)
        return (*query, *self.label_ids)

    def rows_of(self, item: int) -> Rows:
        """Return an item's rows in `readouts`; item -1 is the query."""
        read = self.readouts
        if read is None:
            return NO_ROWS
        labels = read.query_labels if item < 0 else self.label_ids[item]
        return Rows(read.places[1 + item], read.counts[1 + item], labels)

    def query_part(self, start: int, stop: int) -> Rows:
        """Return the scored rows of the query's tokens [start, stop)."""
        return NO_ROWS if self.readouts is None else self.rows_of(-1).part(start, stop)

    @property
    def first_rows(self) -> Sequence[int]:
        """For each item the index of its first row in the answer, then the number of rows."""
        if self.readouts is None:
            return range(len(self.item_ids) + 1)
        return [*accumulate(map(len, self.readouts.places))]

    @property
    def num_rows(self) -> int:
        """Number of rows of the answer: one per item, or the rows of `readouts`."""
        return self.first_rows[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute if nothing is cached: the query once, all items, and labels' nodes."""
        return len(self.query_ids) + sum(map(len, self.item_ids)) + self.num_label_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Sum of the lengths of all scored prompts; the query counts once per prompt."""
        return len(self.query_ids) * len(self.item_ids) + sum(map(len, self.item_ids))


class Timings(Struct, frozen=True, array_like=True, gc=False):
    """Seconds that a request spent in the engine, in three consecutive stages."""

    queue: float  # from its arrival until its first batch was chosen
    batch: float  # from then until that batch was laid out and launched
    device: float  # from then until its last result was collected


class ScoreResult(Struct, frozen=True, eq=False, array_like=True, gc=False):
    """Logits at the last token of each prompt, in item order, float32.

    `label_logits[i][j]` is the logit of label j of item i. `lse[i]` is the log-sum-exp of item i's
    logits over the full vocabulary, or over all classes, so log-probability = logit - lse. It is
    None unless `need_lse`. `computed_tokens` does not count the tokens of labels.

    There are N rows, one per item. With `readouts`, N is the number of scored rows, one item after
    the other, and `label_logits[i]` has the logits of all rows of an item. A scored query counts as
    an item before the others.
    """

    label_logits: Float32Rows
    lse: Float32Array | None  # [N]
    top_ids: Int32Array | None  # [N, num_top] the most probable, lower ids first on a tie
    top_logits: Float32Array | None  # [N, num_top] logits of `top_ids`, exactly as `lse` sums them
    computed_tokens: int
    timings: Timings

    def part(self, items: slice) -> "ScoreResult":
        """Return the result of some items, if each item has one row."""
        return self.rows(items, self.label_logits[items])

    def rows(
        self, some: slice | NDArray[np.intp], label_logits: tuple[Float32Array, ...]
    ) -> "ScoreResult":
        """Return the result of some of the N rows, with these logits of their labels."""
        lse, top_ids, top_logits = (
            None if values is None else values[some]
            for values in (self.lse, self.top_ids, self.top_logits)
        )
        return replace(
            self, label_logits=label_logits, lse=lse, top_ids=top_ids, top_logits=top_logits
        )


def most_tokens(request: ScoreRequest, limits: BackendLimits) -> int:
    """Count the tokens to compute if nothing is cached. Prompts may be computed again for nodes."""
    trie = request.trie
    if trie is None:
        return request.num_tokens
    query, items = split_for_labels(request, limits)
    tokens = len(query) + request.num_label_tokens
    longer = sum(len(path) - 1 for path in trie.paths())
    for number, item in enumerate(items):
        for prompt in prompts_with_nodes(request, number, item, limits):
            tokens += len(prompt)
            if not fits_batch(prompt, trie, limits):  # each node is computed with its whole prompt
                tokens += len(prompt) * trie.num_nodes + longer
    return tokens


def fits_batch(item: Int32Array, trie: LabelTrie, limits: BackendLimits, rows: int = 1) -> bool:
    """Return True if an item and the nodes of its rows may be computed in one batch.

    With --deterministic they may not: the bits of a score depend on the division into segments, so
    each node is computed with its whole prompt.
    """
    tokens = len(item) + rows * trie.num_nodes
    return not limits.deterministic_chunk and tokens <= limits.max_tokens


def prompts_with_nodes(
    request: ScoreRequest, number: int, item: Int32Array, limits: BackendLimits
) -> list[Int32Array]:
    """Return the prefixes of an item that are computed before the nodes of its rows.

    This is one prefix, up to the last scored row. If that does not fit a batch with all nodes, it
    is one prefix for each scored row.
    """
    if request.readouts is None or request.trie is None:
        return [item]
    *places, last = request.rows_of(number).places.tolist()
    if fits_batch(item[: last + 1], request.trie, limits, 1 + len(places)):
        places = []
    return [item[: place + 1] for place in (*places, last)]


def split_for_labels(
    request: ScoreRequest, limits: BackendLimits
) -> tuple[Int32Array, tuple[Int32Array, ...]]:
    """Return query and items. If there is one item, and it does not fit a batch with its nodes, all
    its tokens but the last move to the query.

    A query can be computed in chunks, so its length does not matter, but it needs KV pages. With
    --deterministic nothing moves, because the query's length must depend on the query alone.
    """
    query = request.query_ids
    items = request.item_ids
    trie = request.trie
    may_move = len(items) == 1 and not limits.deterministic_chunk and request.readouts is None
    if trie is None or not may_move or fits_batch(items[0], trie, limits):
        return query, items
    longer = np.concatenate((query, items[0][:-1]))
    if len(longer) > limits.num_pages * limits.page_size:
        return query, items
    return longer, (items[0][-1:],)
