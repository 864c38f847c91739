"""Matrix products with float32 sums, and functions that read and write rows of arrays.

The precision of each product is explicit, because by default XLA multiplies float32 numbers in TF32
on CUDA and in bfloat16 on TPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

MOST = 127  # a row's largest magnitude after scaling to int8; see `gpuscore_kernels.quantized`
EPS = float(jnp.finfo(jnp.float32).eps)  # the scale that a row of zeros gets

# Dimensions of the left array, and of the right one.
Dims: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def contract(left: Array, right: Array, over: Dims, batch: Dims = ((), ())) -> Array:
    """Multiply over the dimensions `over`; the result is float32.

    On a CPU the inputs are converted to float32 first, because products in another dtype are slow
    if the CPU has no instructions for it. The result is the same.
    """
    product = partial(multiply, over=over, batch=batch)
    if left.dtype == jnp.float32:
        return product(left, right)

    def in_float32(left: Array, right: Array) -> Array:
        return product(left.astype(jnp.float32), right.astype(jnp.float32))

    return lax.platform_dependent(left, right, cpu=in_float32, default=product)


def multiply(left: Array, right: Array, over: Dims, batch: Dims = ((), ())) -> Array:
    """Multiply without converting the inputs; the result is float32.

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


class Quantized(NamedTuple):
    """A weight in int8 with a scale per row. Both may have a first dimension over layers."""

    weight: Array  # [B, A]
    scale: Array  # [B], float32


def rows_of(weight: Array | Quantized, start: int, stop: int | None = None) -> Array | Quantized:
    """Return rows `start` to `stop` of a weight."""
    if isinstance(weight, Quantized):
        return Quantized(weight.weight[start:stop], weight.scale[start:stop])
    return weight[start:stop]


def linear(x: Array, weight: Array | Quantized, bias: Array | None = None) -> Array:
    """Apply weight [B, A] and bias [B] to x [T, A] -> [T, B], rounded once to x's dtype."""
    if isinstance(weight, Quantized):
        out = _int8_product(x, weight)
    else:
        out = contract(x, weight.astype(x.dtype), ((1,), (1,)))
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def _int8_product(x: Array, weight: Quantized) -> Array:
    """Quantise each row of x to int8 and multiply. The sums are exact, the result is float32."""
    values = x.astype(jnp.float32)
    scale = _divide(jnp.abs(values).max(axis=1), jnp.float32(MOST))
    scale = jnp.where(scale == 0, EPS, scale)
    rows = jnp.round(jnp.clip(_divide(values, scale[:, None]), -MOST, MOST)).astype(jnp.int8)
    sums = lax.dot_general(
        rows, weight.weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return sums.astype(jnp.float32) * weight.scale * scale[:, None]


def _divide(x: Array, by: Array) -> Array:
    """Divide, with one rounding.

    If the divisor is broadcast, XLA multiplies by its reciprocal instead, which rounds twice. A
    quotient half way between two integers could then become another integer than in torch.
    """
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


# The functions below assume that all indices are in range. Without this, each access needs a dozen
# operations for NumPy's rules, which take XLA longer to compile than all the rest.


def rows_at(x: Array, places: Array) -> Array:
    """Return the rows of x at the indices `places` [n], as [n, ...]."""
    return as_bits(x, lambda bits: bits.at[places].get(mode="promise_in_bounds"))


def as_bits(x: Array, read: Callable[[Array], Array]) -> Array:
    """Return `read(x)`; on a CPU, read an x of 16-bit numbers as integers to save memory.

    If a loop reads a part of such an x in each step, XLA on a CPU first converts all of x to
    float32: 0.6 GiB for the label head of 151,936 tokens. Reading integers takes half of that. On a
    TPU it would be the other way round: XLA copies nothing of x, but would copy all of it as
    integers.
    """
    if x.dtype.itemsize != 2:
        return read(x)

    def read_integers(x: Array) -> Array:
        return lax.bitcast_convert_type(read(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    return lax.platform_dependent(x, cpu=read_integers, default=read)


def part(x: Array, start: Array, size: int) -> Array:
    """Return `size` rows of x, the first one at `start`."""
    return lax.dynamic_slice_in_dim(x, start, size, allow_negative_indices=False)


def element(x: Array, place: Array) -> Array:
    """Return the entry of x [n] at index `place`, as []."""
    return part(x, place, 1)[0]


def put(x: Array, values: Array, start: ArrayLike) -> Array:
    """Return x with `values` in place of its rows that begin at `start`."""
    zeros = (jnp.int32(0),) * (x.ndim - 1)
    return lax.dynamic_update_slice(x, values, (start, *zeros), allow_negative_indices=False)
