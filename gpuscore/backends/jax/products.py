"""Matrix products with float32 sums and an explicit precision.

By default XLA multiplies float32 numbers in TF32 on CUDA and in bfloat16 on TPUs.
"""

from functools import partial
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array, lax

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


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Apply weight [B, A] and bias [B] to x [T, A] -> [T, B], rounded once to x's dtype."""
    out = contract(x, weight, ((1,), (1,)))
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)
