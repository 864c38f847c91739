"""One linear layer of random weights on random batches, compared with the recurrence in float64."""

from dataclasses import replace

import numpy as np
import torch

from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.delta_net.layer import DeltaWeights, LinearAttention
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.types.batch import PackedBatch
from support.batches import int32
from support.recurrence import Float64, State, Weights, recurrence

SLOTS = 12
NET = DeltaNet(2, 6, 12, 20, 4, (True,))
CPU = torch.device("cpu")


class Config:
    """The part of a `DecoderConfig` that one linear layer needs."""

    def __init__(self, net: DeltaNet) -> None:
        self.delta_net, self.num_layers, self.rms_norm_eps = net, 1, 1e-5


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


def exact(x: torch.Tensor) -> Float64:
    return x.double().cpu().numpy()


def compare(
    rng: np.random.Generator,
    batch: PackedBatch,
    net: DeltaNet = NET,
    sharp: bool = False,
    compiler: Compiler = eagerly,
    device: torch.device = CPU,
) -> None:
    """Compare one layer's outputs and states with the recurrence; other slots hold NaN.

    With `sharp` hardly anything decays, and rows are overwritten: the hardest systems to solve.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).float().to(device)

    heads = net.num_value_heads
    weights = DeltaWeights(
        normal(net.kernel, net.convolved),
        -normal(heads).exp(),
        normal(heads),
        normal(net.value_dim),
    )
    if sharp:
        weights.decay.mul_(1e-4)
    pool = StatePool(Config(net), SLOTS, torch.float32, device)
    matrices, tails = pool.matrices[0].fill_(torch.nan), pool.tails[0].fill_(torch.nan)
    for slot in batch.prefix_states[batch.prefix_states >= 0].tolist():
        matrices[slot], tails[slot] = normal(*matrices.shape[1:]), normal(*tails.shape[1:])
    slots = {
        slot: State(grouped(exact(matrices[slot]), net), exact(tails[slot]))
        for slot in range(SLOTS)
    }
    columns = net.convolved + heads * (net.value_dim + 2)
    rows = normal(batch.num_tokens, columns)
    if sharp:
        rows[:] = rows[:1] + 0.05 * rows
    numbers = [exact(getattr(weights, name)) for name in ("conv", "decay", "bias", "norm")]
    want, kept = recurrence(batch, net, Weights(*numbers, 1e-5), exact(rows), slots)
    got = LinearAttention(Config(net), pool, compiler).prepare(batch).run(0, weights, rows)
    np.testing.assert_allclose(exact(got), want, atol=2e-4, rtol=2e-4)
    for slot, state in kept.items():
        found = grouped(exact(matrices[slot]), net)
        np.testing.assert_allclose(found, state.matrix, atol=1e-4, rtol=1e-3)
        np.testing.assert_array_equal(exact(tails[slot]), state.tail)
    untouched = set(range(SLOTS)) - set(kept) - set(batch.prefix_states.tolist())
    assert matrices[sorted(untouched)].isnan().all()
