"""The rule of linear layers as code: a float64 recurrence, token by token, over a tree of segments.

A token's state is its parent token's state (the token before it in its segment, or the last of its
segment's parent, or of the cached prefix), decayed and corrected. It sees nothing else.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.types.batch import PackedBatch

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class State:
    """A matrix [value heads, Dk, Dv], and the convolution's last inputs [kernel - 1, C]."""

    matrix: Float64
    tail: Float64


@dataclass(frozen=True)
class Weights:
    """The weights of `delta_net.layer.DeltaWeights`, and the norms' epsilon."""

    conv: Float64
    decay: Float64
    bias: Float64
    norm: Float64
    eps: float


def silu(x: Float64) -> Float64:
    return x / (1 + np.exp(-x))


def unit(x: Float64) -> Float64:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def step(net: DeltaNet, weights: Weights, row: Float64, before: State) -> tuple[Float64, State]:
    """Return the output [values] of a row of projections, and the state after it."""
    values = net.num_value_heads * net.value_dim
    mixed, gate, strength, time = np.split(
        row, np.cumsum([net.convolved, values, net.num_value_heads])
    )
    seen = np.vstack([before.tail, mixed])
    convolved = silu((seen * weights.conv).sum(0))
    keys, times = net.num_key_heads * net.key_dim, net.num_value_heads // net.num_key_heads
    q, k = (
        unit(part.reshape(net.num_key_heads, -1)).repeat(times, 0)
        for part in (convolved[:keys], convolved[keys : 2 * keys])
    )
    v = convolved[2 * keys :].reshape(net.num_value_heads, -1)
    decay = np.exp(weights.decay * np.log1p(np.exp(time + weights.bias)))
    matrix = before.matrix * decay[:, None, None]
    known = np.einsum("hkv,hk->hv", matrix, k)
    correction = (v - known) / (1 + np.exp(-strength))[:, None]
    matrix = matrix + k[:, :, None] * correction[:, None, :]
    out = np.einsum("hkv,hk->hv", matrix, q) * net.key_dim**-0.5
    normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + weights.eps) * weights.norm
    return normed.reshape(-1) * silu(gate), State(matrix, seen[1:])


def recurrence(
    batch: PackedBatch,
    net: DeltaNet,
    weights: Weights,
    rows: Float64,
    slots: dict[int, State],
) -> tuple[Float64, dict[int, State]]:
    """Return the outputs [T, values] of projections [T, ...], and the states that are kept.

    Args:
        batch: its lengths, parents and slots.
        net: sizes.
        weights: of the layer.
        rows: the projections.
        slots: the states that cached prefixes may have.
    """
    nothing = State(
        np.zeros((net.num_value_heads, net.key_dim, net.value_dim)),
        np.zeros((net.kernel - 1, net.convolved)),
    )
    kept = dict(zip(batch.state_rows.tolist(), batch.state_slots.tolist(), strict=True))
    ends: list[State] = []
    out, written = np.empty((batch.num_tokens, net.num_value_heads * net.value_dim)), {}
    for segment, parent in enumerate(batch.parent.tolist()):
        slot = int(batch.prefix_states[batch.request_of[segment]])
        state = ends[parent] if parent >= 0 else slots[slot] if slot >= 0 else nothing
        for row in range(*batch.cu_seqlens[segment : segment + 2].tolist()):
            out[row], state = step(net, weights, rows[row], state)
            if row in kept:
                written[kept[row]] = state
        ends.append(state)
    return out, written
