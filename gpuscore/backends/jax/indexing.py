"""Reading and writing rows at places that are known to be inside.

NumPy's rules for negative and outlying places are a dozen operations around every access, which
XLA compiles for longer than all else.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike


def chosen(x: Array, places: Array) -> Array:
    """Rows of x at `places` [n] -> [n, ...]."""
    return x.at[places].get(mode="promise_in_bounds")


def part(x: Array, start: Array, size: int) -> Array:
    """Rows start to start + size of x."""
    return lax.dynamic_slice_in_dim(x, start, size, allow_negative_indices=False)


def put(x: Array, values: Array, start: ArrayLike) -> Array:
    """x with its rows from `start` on replaced by `values`."""
    zeros = (jnp.int32(0),) * (x.ndim - 1)
    return lax.dynamic_update_slice(x, values, (start, *zeros), allow_negative_indices=False)
