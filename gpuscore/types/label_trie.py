"""`LabelTrie`: labels of several tokens, as what is computed below every item of a request.

The tokens of a label except its last are *nodes*, and labels that begin alike share them. The
item's row gives the distribution of the first tokens, a node's row that of the tokens after it:

    labels [12, 7, 5], [12, 8] and [9]         item          row: 12 and 9
                                                 12          row: 7 and 8
                                                   7         row: 5
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuscore.types.arrays import Float64Array, Int32Array


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """The labels of a request, the same for all its items.

    K nodes make 1 + K rows per item: its own, then those of the nodes, in preorder. A row has the
    different tokens that may follow there, and all rows together have C of them.

    Attributes:
        sequences: the L labels' tokens, as given.
        tokens: the nodes' tokens.
        parents: of each node the one that it continues; -1 = the item.
        next_ids: of each row the tokens that may follow.
        places: of each label's tokens, one label after the other, their places among all rows'.
        lengths: of each label.
        counted: the labels that `label_mass` adds up: once each, without those that continue
            another label, whose probability contains theirs.

    Raises:
        ValueError: there is no label, or one without tokens.
    """

    sequences: tuple[tuple[int, ...], ...]
    tokens: Int32Array = field(init=False, compare=False, repr=False)  # [K]
    parents: Int32Array = field(init=False, compare=False, repr=False)  # [K]
    next_ids: tuple[Int32Array, ...] = field(init=False, compare=False, repr=False)  # [1 + K]
    places: Int32Array = field(init=False, compare=False, repr=False)  # [sum of lengths]
    lengths: Int32Array = field(init=False, compare=False, repr=False)  # [L]
    counted: Int32Array = field(init=False, compare=False, repr=False)  # [at most L]

    def __post_init__(self) -> None:
        if not self.sequences or not all(self.sequences):
            raise ValueError("labels are at least one, of at least one token each")
        grown = _Growing()
        paths = [grown.add(sequence) for sequence in self.sequences]
        order = grown.preorder()  # of the rows, the item's first
        row_of = {number: row for row, number in enumerate(order)}
        columns = [grown.columns[number] for number in order]
        starts = np.cumsum([0, *map(len, columns)])
        places = [starts[row_of[number]] + column for path in paths for number, column in path]
        values = {
            "tokens": _int32([grown.tokens[number] for number in order[1:]]),
            "parents": _int32([row_of[grown.parents[number]] - 1 for number in order[1:]]),
            "next_ids": tuple(_int32([*found]) for found in columns),
            "places": _int32(places),
            "lengths": _int32([*map(len, self.sequences)]),
            "counted": _int32(_shortest(self.sequences)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, sequences: Sequence[Int32Array]) -> "LabelTrie":
        return cls(tuple(tuple(ids.tolist()) for ids in sequences))

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows of each item: its own and those of the nodes."""
        return 1 + len(self.tokens)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest label."""
        return int(self.lengths.max())

    @property
    def first_ids(self) -> Int32Array:
        """The first token of each label, [L]."""
        return _int32([sequence[0] for sequence in self.sequences])

    def paths(self) -> list[list[int]]:
        """Return for each node the tokens from the item's first one down to its own."""
        found: list[list[int]] = []
        for token, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            found.append([*(found[parent] if parent >= 0 else ()), token])
        return found

    def sums(self, logprobs: Float64Array) -> Float64Array:
        """Return the labels' log-probabilities [N, L] of those of all rows' tokens, [N, C]."""
        starts = np.cumsum(self.lengths) - self.lengths
        summed: Float64Array = np.add.reduceat(logprobs[:, self.places], starts, axis=1)
        return summed


class _Growing:
    """A trie to which labels are added; number 0 is the item, others are nodes as they came."""

    def __init__(self) -> None:
        self.tokens, self.parents = [-1], [-1]
        self.columns: list[dict[int, int]] = [{}]  # of each row, its tokens and their columns
        self._below: list[dict[int, int]] = [{}]  # the nodes that continue it, by token

    def add(self, sequence: Sequence[int]) -> list[tuple[int, int]]:
        """Return the row that gives each token's probability, by number, and the column in it."""
        number, path = 0, []
        for place, token in enumerate(sequence):
            found = self.columns[number]
            path.append((number, found.setdefault(token, len(found))))
            if place < len(sequence) - 1:
                number = self._node(number, token)
        return path

    def preorder(self) -> list[int]:
        order, waiting = [], [0]
        while waiting:
            order.append(waiting.pop())
            waiting += reversed(self._below[order[-1]].values())
        return order

    def _node(self, parent: int, token: int) -> int:
        below = self._below[parent]
        if token not in below:
            below[token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.columns.append({})
            self._below.append({})
        return below[token]


def _shortest(sequences: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the places of the labels, each once, of which no other is a proper prefix."""
    ends: list[int] = []
    ordered = sorted(range(len(sequences)), key=lambda label: sequences[label])
    for label in ordered:  # those that continue a label follow it directly
        last = sequences[ends[-1]] if ends else None
        if last is None or sequences[label][: len(last)] != last:
            ends.append(label)
    return sorted(ends)


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
