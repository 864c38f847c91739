"""A batch as int32 words in one buffer, in an order that depends on the batch's sizes only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from gpuscore.backends.torch.buckets import Bucket
from gpuscore.backends.torch.delta_net.layout import StatePlaces, StateSizes, StateTables
from gpuscore.backends.torch.launcher import label_rows, statistics_rows
from gpuscore.backends.torch.queues import Replay
from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels.extend_attention import aligned, word_slices

TablePlaces: TypeAlias = Callable[[Bucket, int], tuple[Any, ...]]  # for sizes, from a word on


@dataclass(frozen=True, slots=True)
class Places:
    """Places of a batch's parts in the buffer of words; they depend on its sizes only."""

    tokens: slice
    positions: slice
    slots: slice
    scored: slice
    num_tokens: slice  # one word: tokens without padding
    num_scored: slice  # one word
    tables: tuple[Any, ...]  # of attention
    states: StatePlaces | None  # of a model with linear layers
    end: int  # first word after them, where lists of any length follow

    @staticmethod
    def of(sizes: Bucket, table_places: TablePlaces, states: StateSizes | None = None) -> "Places":
        lengths = (sizes.tokens, sizes.tokens, sizes.tokens, sizes.scored, 1, 1)
        tokens, positions, slots, scored, num_tokens, num_scored = word_slices(lengths, 0)
        tables = table_places(sizes, aligned(num_scored.stop))
        end = tables[-1].end
        of_states = None if states is None else StatePlaces.of(states, aligned(end))
        return Places(
            tokens=tokens,
            positions=positions,
            slots=slots,
            scored=scored,
            num_tokens=num_tokens,
            num_scored=num_scored,
            tables=tables,
            states=of_states,
            end=end if of_states is None else of_states.end,
        )


class PlannedBatch(NamedTuple):
    """A batch with its tables, the places of its parts, and its graph if there is one."""

    batch: PackedBatch
    tables: list[Any]
    states: StateTables | None
    places: Places
    replay: Replay | None = None


class HeadPlaces(NamedTuple):
    """Places of the label head's inputs in the buffer of words."""

    label_rows: slice  # the scored row of each label
    label_ids: slice
    statistics_rows: slice  # scored rows that need statistics over the vocabulary


def num_words(batch: PackedBatch, lists: int, places: Places) -> int:
    """Return the most words that a batch takes, with those of lists of any length and the inputs of
    its label head."""
    of_head = 2 * aligned(len(batch.label_token_ids)) + aligned(len(batch.score_rows))
    return places.end + lists + aligned(1) + of_head


def write(planned: PlannedBatch, words: Int32Array) -> int:
    """Write the batch to its places, padded with token 0 that has no slot and no tile.

    Returns:
        The first free word after it.
    """
    batch = planned.batch
    places = planned.places
    for part, values, filling in (
        (places.tokens, batch.token_ids, 0),
        (places.positions, batch.positions, 0),
        (places.slots, batch.slot_mapping, -1),
        (places.scored, batch.score_rows, 0),
    ):
        end = part.start + len(values)
        words[part.start : end] = values
        words[end : part.stop] = filling
    words[places.num_tokens] = batch.num_tokens
    words[places.num_scored] = len(batch.score_rows)
    if places.states is not None and planned.states is not None:
        places.states.write(planned.states, words)
    tail = places.end
    for place, table in zip(places.tables, planned.tables, strict=True):
        tail = place.write(table, words, tail)
    return tail


def write_head(batch: PackedBatch, words: Int32Array, start: int) -> HeadPlaces:
    """Write the label head's inputs from word `start` on, and return their places."""
    inputs = (label_rows(batch), batch.label_token_ids, statistics_rows(batch))
    places = HeadPlaces(*word_slices([len(values) for values in inputs], aligned(start)))
    for place, values in zip(places, inputs, strict=True):
        words[place] = values
    return places
