"""Arrays of one batch in a buffer of int32 words; a CUDA graph has room for larger ones."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from gpuscore.types.batch import Int32Array
from gpuscore_kernels.extend_attention import aligned, word_slices
from gpuscore_kernels.extend_attention.table import WordsT


class Room(NamedTuple):
    """Room for an array that may have fewer rows, and the number in the words of the others."""

    shape: tuple[int, ...]
    filling: int = 0


class WordPlaces(NamedTuple):
    """The places of arrays in the buffer, one after the other."""

    rooms: Sequence[Room]
    slices: Sequence[slice]

    @staticmethod
    def of(rooms: Sequence[Room], start: int) -> "WordPlaces":
        return WordPlaces(rooms, word_slices([math.prod(room.shape) for room in rooms], start))

    @property
    def end(self) -> int:
        return aligned(self.slices[-1].stop)

    def hold(self, arrays: Sequence[np.ndarray]) -> bool:
        """Return whether there is room for these arrays; there may be fewer of them."""
        return len(arrays) <= len(self.rooms) and all(
            size <= most
            for array, room in zip(arrays, self.rooms, strict=False)
            for size, most in zip(array.shape, room.shape, strict=True)
        )

    def write(self, arrays: Sequence[np.ndarray], words: Int32Array, tail: int = 0) -> int:
        """Write arrays, without what is beyond their rooms, and fill the rest.

        Return `tail`, because none has lists of any length behind it.
        """
        for room, place, array in zip_longest(self.rooms, self.slices, arrays):
            start = place.start
            if array is not None:
                flat = array.reshape(-1)[: place.stop - start]
                start += len(flat)
                words[place.start : start] = flat
            if start < place.stop:
                words[start : place.stop] = room.filling
        return tail

    def views(self, words: WordsT) -> list[WordsT]:
        """Return the arrays that are in these words, rooms and all."""
        places = zip(self.slices, self.rooms, strict=True)
        return [words[place].reshape(room.shape) for place, room in places]


def exact(arrays: Sequence[np.ndarray]) -> list[Room]:
    """Return rooms of the sizes of these arrays."""
    return [Room(array.shape) for array in arrays]
