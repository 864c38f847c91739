"""Matrix products: float32 sums, and a precision that is always said.

Left to itself XLA multiplies float32 in TF32 on CUDA and in bfloat16 on TPUs.
"""

from functools import partial
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array, lax

Dims: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # of the left side, of the right side


def contract(left: Array, right: Array, over: Dims, batch: Dims = ((), ())) -> Array:
    """The product in float32, not rounded."""
    product = partial(multiply, over=over, batch=batch)
    if left.dtype == jnp.float32:
        return product(left, right)
    # The same numbers: a CPU without instructions for the format takes a slow loop otherwise.
    return lax.platform_dependent(left, right, cpu=partial(_widened, product), default=product)


def multiply(left: Array, right: Array, over: Dims, batch: Dims = ((), ())) -> Array:
    """The product of the device in float32.

    Products of bfloat16 or float16 numbers are exact in float32, so they need no other precision.
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


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [T, A] with weight [B, A] and bias [B] -> [T, B], rounded once to x's dtype."""
    out = contract(x, weight, ((1,), (1,)))
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)
