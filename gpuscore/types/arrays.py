"""Types of the NumPy arrays that cross boundaries, and how sequences of token ids compare."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Return the number of first tokens that both have."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def sorted_order(sequences: Sequence[Int32Array]) -> list[int]:
    """Return the places of sequences of token ids, sorted as the ids are: a prefix comes first."""
    # Of ids, which are not negative, big-endian bytes sort as the ids do.
    return sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i4").tobytes())
