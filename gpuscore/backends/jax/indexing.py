"""Reading and writing rows at places that are known to be in range.

NumPy's rules for negative and out-of-range places need a dozen operations around every access, and
XLA takes longer to compile those than everything else.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike


def chosen(x: Array, places: Array) -> Array:
    """Return the rows of x at `places` [n], as [n, ...]."""
    return x.at[places].get(mode="promise_in_bounds")


def part(x: Array, start: Array, size: int) -> Array:
    """Return `size` rows of x from `start` on."""
    return lax.dynamic_slice_in_dim(x, start, size, allow_negative_indices=False)


def one_of(x: Array, place: Array) -> Array:
    """Return the entry of x [n] at `place`, as []."""
    return part(x, place, 1)[0]


def put(x: Array, values: Array, start: ArrayLike) -> Array:
    """Return x with its rows from `start` on replaced by `values`."""
    zeros = (jnp.int32(0),) * (x.ndim - 1)
    return lax.dynamic_update_slice(x, values, (start, *zeros), allow_negative_indices=False)
