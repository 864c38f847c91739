"""Promise: JAX takes rows twice where a recipe says so, as torch does."""

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.linear import Products, QuantizedLinear
from gpuscore_kernels.quantized.reference import quantize_rows
from support.backends import needs_jax

pytestmark = needs_jax


@pytest.mark.parametrize("twice", [False, True])
def test_rows_are_taken_as_in_torch(twice):
    import jax
    import jax.numpy as jnp

    from gpuscore.backends.jax.products import Quantized, linear

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 130, generator=generator)
    x[:, 5] *= 100
    w, scale = quantize_rows(torch.randn(33, 130, generator=generator), torch.int8)
    want = Products()(QuantizedLinear(w, scale, None, twice), x).numpy()
    weight = Quantized(jnp.array(w.numpy()), jnp.array(scale.numpy()), jnp.array(twice))
    got = np.asarray(jax.jit(linear)(jnp.array(x.numpy()), weight))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    once = Products()(QuantizedLinear(w, scale, None), x).numpy()
    assert (np.abs(got - once).max() > 1e-2) == twice
