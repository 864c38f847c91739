"""Types of the NumPy arrays that cross boundaries."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]


Float32Array: TypeAlias = NDArray[np.float32]


Float64Array: TypeAlias = NDArray[np.float64]


BoolArray: TypeAlias = NDArray[np.bool_]


NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)
