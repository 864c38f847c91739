"""One linear layer of random weights over one batch, computed by each backend, with arrays of
NumPy, and compared with the recurrence in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.backends.torch.compiler import Compiler
from gpuscore.backends.torch.delta_net.layer import DeltaNetBackend, DeltaWeights
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.types.batch import Float32Array, PackedBatch
from gpuscore_kernels import Implementation
from support.batches import int32
from support.recurrence import State, Weights, recurrence

SLOTS = 12
EPS = 1e-5
NET = DeltaNet(2, 6, 12, 20, 4, (True,))
CPU = torch.device("cpu")


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


def with_states(rng: np.random.Generator, batch: PackedBatch) -> PackedBatch:
    """Give the prefixes of a batch states, and keep the states after some rows."""
    cached = batch.prefix_lens > 0
    free = rng.permutation(SLOTS)
    states = np.where(cached, free[: len(cached)], -1)
    count = min(5, batch.num_tokens)
    rows = np.sort(rng.choice(batch.num_tokens, count, replace=False))
    return replace(
        batch,
        prefix_states=int32(states),
        state_rows=int32(rows),
        state_slots=int32(free[len(cached) : len(cached) + count]),
    )


def grouped(matrix: np.ndarray, net: DeltaNet) -> np.ndarray:
    """Return a matrix [Hk, Dk, R Dv], as the pool has it, head by head."""
    by_value = matrix.reshape(net.num_key_heads, net.key_dim, -1, net.value_dim)
    return by_value.transpose(0, 2, 1, 3).reshape(-1, net.key_dim, net.value_dim)


def drawn(
    rng: np.random.Generator, batch: PackedBatch, net: DeltaNet = NET, sharp: bool = False
) -> tuple[LayerWeights, Float32Array, Slots]:
    """Return weights, projections and slots; those that no prefix has hold NaN."""

    def normal(*shape: int) -> Float32Array:
        return rng.standard_normal(shape).astype(np.float32)

    heads = net.num_value_heads
    weights = LayerWeights(
        normal(net.kernel, net.convolved),
        -np.exp(normal(heads)),
        normal(heads),
        normal(net.value_dim),
    )
    if sharp:  # hardly any decay, and rows that are overwritten: the hardest systems to solve
        weights = weights._replace(decay=weights.decay * np.float32(1e-4))
    values = net.num_value_heads // net.num_key_heads * net.value_dim
    matrices = np.full((SLOTS, net.num_key_heads, net.key_dim, values), np.nan, np.float32)
    tails = np.full((SLOTS, net.kernel - 1, net.convolved), np.nan, np.float32)
    for slot in batch.prefix_states[batch.prefix_states >= 0].tolist():
        matrices[slot], tails[slot] = normal(*matrices.shape[1:]), normal(*tails.shape[1:])
    rows = normal(batch.num_tokens, net.convolved + heads * (net.value_dim + 2))
    if sharp:
        rows[:] = rows[:1] + np.float32(0.05) * rows
    return weights, rows, (matrices, tails)


def compare(
    rng: np.random.Generator,
    batch: PackedBatch,
    run: RunLayer,
    net: DeltaNet = NET,
    sharp: bool = False,
) -> None:
    """Compare one layer's outputs and states with the recurrence."""
    weights, rows, (matrices, tails) = drawn(rng, batch, net, sharp)
    slots = {
        slot: State(grouped(matrices[slot].astype(float), net), tails[slot].astype(float))
        for slot in range(SLOTS)
    }
    exact = Weights(*(x.astype(float) for x in weights), EPS)
    expected, kept = recurrence(batch, net, exact, rows.astype(float), slots)
    got, (matrices, tails) = run(batch, net, weights, rows, (matrices, tails))
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=2e-4)
    for slot, state in kept.items():
        computed = grouped(matrices[slot], net)
        np.testing.assert_allclose(computed, state.matrix, atol=1e-4, rtol=1e-3)
        np.testing.assert_array_equal(tails[slot], state.tail.astype(np.float32))
    untouched = set(range(SLOTS)) - set(kept) - set(batch.prefix_states.tolist())
    assert np.isnan(matrices[sorted(untouched)]).all()


class OneLayer:
    """The part of a `DecoderConfig` that one linear layer needs."""

    def __init__(self, net: DeltaNet) -> None:
        self.delta_net, self.num_layers, self.rms_norm_eps = net, 1, EPS


def on_torch(
    compiler: Compiler, device: torch.device = CPU, impl: Implementation = "reference"
) -> RunLayer:
    """Return the layer as torch's backend computes it."""

    def there(values: Float32Array) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    def run(
        batch: PackedBatch, net: DeltaNet, weights: LayerWeights, rows: Float32Array, slots: Slots
    ) -> tuple[Float32Array, Slots]:
        config: Any = OneLayer(net)
        pool = StatePool(config, SLOTS, torch.float32, device)
        for side, values in zip((pool.matrices, pool.tails), slots, strict=True):
            side[0].copy_(there(values))
        layers = DeltaNetBackend(config, pool, compiler, impl).prepare(batch)
        assert layers is not None
        out = layers.run(0, DeltaWeights(*map(there, weights)), there(rows))
        return out.cpu().numpy(), (pool.matrices[0].cpu().numpy(), pool.tails[0].cpu().numpy())

    return run
