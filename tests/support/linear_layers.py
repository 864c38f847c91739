"""One linear layer over one batch, computed by each backend, with arrays of NumPy."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.backends.torch.compiler import Compiler
from gpuscore.backends.torch.delta_net.layer import DeltaWeights, LinearAttention
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.types.batch import Float32Array, PackedBatch

SLOTS = 12
TOKENS = 5120  # of the bucket of JAX's program
EPS = 1e-5


class LayerWeights(NamedTuple):
    """Weights as `delta_net.layer.DeltaWeights` has them."""

    conv: Float32Array
    decay: Float32Array
    bias: Float32Array
    norm: Float32Array


# Matrices [SLOTS, Hk, Dk, R Dv] and tails [SLOTS, kernel - 1, C] of all slots.
Slots: TypeAlias = tuple[Float32Array, Float32Array]
# (batch, net, weights, projections [T, ...], slots) -> outputs [T, values], slots afterwards.
RunLayer: TypeAlias = Callable[
    [PackedBatch, DeltaNet, LayerWeights, Float32Array, Slots], tuple[Float32Array, Slots]
]


class OneLayer:
    """The part of a `DecoderConfig` that one linear layer needs."""

    def __init__(self, net: DeltaNet) -> None:
        self.delta_net, self.num_layers, self.rms_norm_eps = net, 1, EPS


def on_torch(compiler: Compiler) -> RunLayer:
    """Return the layer as torch's backend computes it."""

    def run(
        batch: PackedBatch, net: DeltaNet, weights: LayerWeights, rows: Float32Array, slots: Slots
    ) -> tuple[Float32Array, Slots]:
        config: Any = OneLayer(net)
        pool = StatePool(config, SLOTS, torch.float32, torch.device("cpu"))
        for side, values in zip((pool.matrices, pool.tails), slots, strict=True):
            side[0].copy_(torch.from_numpy(values))
        layer = LinearAttention(config, pool, compiler).prepare(batch)
        assert layer is not None
        out = layer.run(0, DeltaWeights(*map(torch.from_numpy, weights)), torch.from_numpy(rows))
        return out.numpy(), (pool.matrices[0].numpy(), pool.tails[0].numpy())

    return run


def on_jax(rows_of_chunk: int) -> RunLayer:
    """Return the layer as JAX's backend computes it, in chunks of at most so many rows.

    Rows of padding, and places of ends that are held, begin with NaN.
    """

    def run(
        batch: PackedBatch, net: DeltaNet, weights: LayerWeights, rows: Float32Array, slots: Slots
    ) -> tuple[Float32Array, Slots]:
        from gpuscore.backends.jax.layout import StateSizes, StateTables, state_lengths
        from gpuscore.backends.jax.waves import fill_states

        sizes = StateSizes(net.kernel, rows_of_chunk, chunks=3, ends=13, slots=SLOTS)
        tables = StateTables(*(np.zeros(n, np.int32) for n in state_lengths(sizes, TOKENS)))
        fill_states(tables, batch, sizes, TOKENS)
        padded = np.full((TOKENS, rows.shape[1]), np.nan, np.float32)
        padded[: len(rows)] = rows
        out, *after = _program(net, sizes)(tables, weights, padded, *slots)
        matrices, tails = map(np.asarray, after)
        return np.asarray(out)[: len(rows)], (matrices, tails)

    return run


@cache
def _program(net: DeltaNet, sizes: Any) -> Any:
    import jax

    return jax.jit(partial(_run, net, sizes))


def _run(
    net: DeltaNet, sizes: Any, tables: Any, weights: Any, rows: Any, matrices: Any, tails: Any
) -> tuple[Any, Any, Any]:
    import jax.numpy as jnp

    from gpuscore.backends.jax.attention import States
    from gpuscore.backends.jax.linear_layer import Recurrence, RuleWeights

    config: Any = OneLayer(net)
    layer = Recurrence(config, net, sizes, tables)
    buffers = layer.buffers(TOKENS, jnp.float32)
    buffers = buffers._replace(
        mixed=buffers.mixed.at[:TOKENS].set(rows),
        out=buffers.out.at[:].set(jnp.nan),
        held=buffers.held.at[1:].set(jnp.nan),
    )
    states = States(matrices, tails.reshape(SLOTS, -1))
    buffers, states = layer.run(jnp.int32(0), RuleWeights(*weights), buffers, states)
    return buffers.out[:TOKENS], states.matrices, states.tails.reshape(tails.shape)
