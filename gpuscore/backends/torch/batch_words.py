"""A batch as int32 words in one buffer, in an order that depends on the batch's sizes only."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuscore.backends.torch.buckets import Bucket
from gpuscore.backends.torch.launcher import statistics_rows
from gpuscore.backends.torch.queues import Replay
from gpuscore.backends.torch.words import ArraySpec, WordPlaces, exact
from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels.extend_attention.table import aligned

TablePlaces: TypeAlias = Callable[[Bucket, int], tuple[Any, ...]]  # of (sizes, first word)


class Places(NamedTuple):
    """Places of a batch's parts in the buffer of words; they depend on its sizes only."""

    arrays: WordPlaces  # of `arrays_of`, then of linear layers
    tables: tuple[Any, ...]  # of attention

    @staticmethod
    def of(sizes: Bucket, table_places: TablePlaces, states: Sequence[ArraySpec] = ()) -> "Places":
        tokens = ArraySpec((sizes.tokens,))
        slots = ArraySpec((sizes.tokens,), -1)
        specs = tokens, tokens, slots, ArraySpec((sizes.scored,)), ArraySpec((2,)), *states
        arrays = WordPlaces.of(specs, 0)
        return Places(arrays, table_places(sizes, arrays.end))

    @property
    def end(self) -> int:
        """Return the first word after them, where lists of any length follow."""
        return int(self.tables[-1].end)


class PlannedBatch(NamedTuple):
    """A batch with its arrays, the places of its parts, and its graph if there is one."""

    batch: PackedBatch
    arrays: Sequence[np.ndarray]
    tables: list[Any]  # of attention
    lists: int  # the most words of the tables' lists, which have any length
    places: Places
    replay: Replay | None = None

    @property
    def num_words(self) -> int:
        """Return the most words that the batch takes, with the inputs of its label head."""
        batch = self.batch
        of_head = 2 * aligned(len(batch.label_token_ids)) + aligned(len(batch.score_rows))
        return self.places.end + self.lists + aligned(1) + of_head


def arrays_of(batch: PackedBatch) -> tuple[np.ndarray, ...]:
    """Return token ids, positions, slots and scored rows, and how many tokens and scored rows there
    are. Padding has token 0, and neither slot nor tile."""
    counts = np.array([batch.num_tokens, len(batch.score_rows)])
    return batch.token_ids, batch.positions, batch.slot_mapping, batch.score_rows, counts


def write(planned: PlannedBatch, words: Int32Array) -> int:
    """Write the batch to its places, padded; return the first free word after it."""
    places = planned.places
    tail = places.arrays.write(planned.arrays, words, places.end)
    for place, table in zip(places.tables, planned.tables, strict=True):
        tail = place.write(table, words, tail)
    return tail


def write_head(batch: PackedBatch, words: Int32Array, start: int) -> WordPlaces:
    """Write the label head's inputs from word `start` on: the scored row of each label, the labels,
    and the scored rows that need statistics over the vocabulary."""
    inputs = (batch.label_rows, batch.label_token_ids, statistics_rows(batch))
    places = WordPlaces.of(exact(inputs), aligned(start))
    places.write(inputs, words)
    return places
