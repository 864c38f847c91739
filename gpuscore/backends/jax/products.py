"""Matrix products with float32 sums and an explicit precision; reading and writing of rows.

By default XLA multiplies float32 numbers in TF32 on CUDA and in bfloat16 on TPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

MOST = 127  # a row's largest magnitude in int8; see `gpuscore_kernels.quantized`
EPS = float(jnp.finfo(jnp.float32).eps)  # scale of a row of zeros

Dims: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # of the left side, of the right side


def contract(left: Array, right: Array, over: Dims, batch: Dims = ((), ())) -> Array:
    """Multiply; the result is float32, not rounded to the inputs' dtype."""
    product = partial(multiply, over=over, batch=batch)
    if left.dtype == jnp.float32:
        return product(left, right)
    # Widening changes no result; without it, a CPU that lacks instructions for the dtype is slow.
    return lax.platform_dependent(left, right, cpu=partial(_widened, product), default=product)


def multiply(left: Array, right: Array, over: Dims, batch: Dims = ((), ())) -> Array:
    """Multiply on the device, with a float32 result.

    Products of bfloat16 or float16 numbers are exact in float32, so they need no higher precision.
    """
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        (over, batch),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _widened(product: "partial[Array]", left: Array, right: Array) -> Array:
    return product(left.astype(jnp.float32), right.astype(jnp.float32))


class Quantized(NamedTuple):
    """A weight in int8 with a scale per row; or all layers' weights, with a dimension in front."""

    weight: Array  # [B, A]
    scale: Array  # [B], float32


def rows_of(weight: Array | Quantized, start: int, stop: int | None = None) -> Array | Quantized:
    """Return rows `start` to `stop` of a weight."""
    if isinstance(weight, Quantized):
        return Quantized(weight.weight[start:stop], weight.scale[start:stop])
    return weight[start:stop]


def linear(x: Array, weight: Array | Quantized, bias: Array | None = None) -> Array:
    """Apply weight [B, A] and bias [B] to x [T, A] -> [T, B], rounded once to x's dtype."""
    out = _product(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def _product(x: Array, weight: Array | Quantized) -> Array:
    if isinstance(weight, Quantized):
        return _in_eight_bits(x, weight)
    return contract(x, weight.astype(x.dtype), ((1,), (1,)))


def _in_eight_bits(x: Array, weight: Quantized) -> Array:
    """Quantise each row of x and multiply; sums are exact, the result is float32."""
    wide = x.astype(jnp.float32)
    scale = _divided(jnp.abs(wide).max(axis=1), jnp.float32(MOST))
    scale = jnp.where(scale == 0, EPS, scale)
    rows = jnp.round(jnp.clip(_divided(wide, scale[:, None]), -MOST, MOST)).astype(jnp.int8)
    sums = lax.dot_general(
        rows, weight.weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return sums.astype(jnp.float32) * weight.scale * scale[:, None]


def _divided(x: Array, by: Array) -> Array:
    """Divide, rounding once.

    XLA turns a division by a broadcast number into a product with its reciprocal. Then numbers half
    way between two integers would be rounded to another integer than torch rounds them to.
    """
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


# Places are known to be in range. NumPy's rules for negative and out-of-range places need a dozen
# operations around every access, and XLA takes longer to compile those than everything else.


def chosen(x: Array, places: Array) -> Array:
    """Return the rows of x at `places` [n], as [n, ...]."""
    return as_bits(x, lambda bits: bits.at[places].get(mode="promise_in_bounds"))


def as_bits(x: Array, read: Callable[[Array], Array]) -> Array:
    """Return `read(x)`; on a CPU, numbers of 16 bits are read as integers and converted back.

    XLA on a CPU converts all of such an x to float32 before a loop that reads a part in each step:
    0.6 GiB for a head of 151,936 tokens; as integers it copies half of that. On a TPU it would copy
    all of x, where otherwise it copies nothing.
    """
    if x.dtype.itemsize != 2:
        return read(x)
    return lax.platform_dependent(x, cpu=partial(_bits, read), default=read)


def _bits(read: Callable[[Array], Array], x: Array) -> Array:
    return lax.bitcast_convert_type(read(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)


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
