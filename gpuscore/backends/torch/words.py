"""Arrays of one batch in a buffer of int32 words, padded to the sizes of a CUDA graph."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from gpuscore.types.batch import Int32Array
from gpuscore_kernels.extend_attention.table import WordsT, aligned, word_slices


class ArraySpec(NamedTuple):
    """The largest shape of an array, and the number that pads a smaller one."""

    shape: tuple[int, ...]
    padding: int = 0


class WordPlaces(NamedTuple):
    """The places of arrays in the buffer, one after the other."""

    specs: Sequence[ArraySpec]
    slices: Sequence[slice]

    @staticmethod
    def of(specs: Sequence[ArraySpec], start: int) -> "WordPlaces":
        return WordPlaces(specs, word_slices([math.prod(spec.shape) for spec in specs], start))

    @property
    def end(self) -> int:
        return aligned(self.slices[-1].stop)

    def hold(self, arrays: Sequence[np.ndarray]) -> bool:
        """Return whether these arrays fit; there may be fewer of them than specs."""
        return len(arrays) <= len(self.specs) and all(
            size <= most
            for array, spec in zip(arrays, self.specs, strict=False)
            for size, most in zip(array.shape, spec.shape, strict=True)
        )

    def write(self, arrays: Sequence[np.ndarray], words: Int32Array, tail: int = 0) -> int:
        """Write arrays, truncated to their largest shapes, and pad the rest.

        Return `tail`, because no list of any length follows these arrays.
        """
        for spec, place, array in zip_longest(self.specs, self.slices, arrays):
            start = place.start
            if array is not None:
                flat = array.reshape(-1)[: place.stop - start]
                start += len(flat)
                words[place.start : start] = flat
            if start < place.stop:
                words[start : place.stop] = spec.padding
        return tail

    def views(self, words: WordsT) -> list[WordsT]:
        """Return the arrays in these words, with their padding."""
        places = zip(self.slices, self.specs, strict=True)
        return [words[place].reshape(spec.shape) for place, spec in places]


def exact(arrays: Sequence[np.ndarray]) -> list[ArraySpec]:
    """Return specs with the shapes of these arrays."""
    return [ArraySpec(array.shape) for array in arrays]
