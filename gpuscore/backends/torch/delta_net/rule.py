"""Linear layers: a causal convolution, the gated delta rule in chunks, and a gated norm.

Per head and token, with a state S [Dk, Dv], key k, value v, decay a and strength b:

    S = a S;  S = S + k (b (v - k' S))';  output = q' S

A chunk of rows is computed at once (Yang et al., "Gated Delta Networks", 2024): what the rows write
solves a triangular system, because a row's correction depends on the rows before it. All is float32
inside. The plain recurrence is in `tests/support/recurrence.py`.

Shapes: T rows, Hk key heads, R value heads of each, Dk and Dv their sizes, n chunks of L rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import DecoderConfig, DeltaNet
from gpuscore.backends.torch.delta_net.layout import (
    ChunkGroup,
    ConvolutionTaps,
    DeltaLayout,
    lay_out_states,
)
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.types.batch import PackedBatch

# The projections of a layer, in the order in which their results stand side by side: queries, keys
# and values; the gate of the output; the strength and the decay of each value head.
DELTA_PARTS = ("delta_qkv", "delta_z", "delta_b", "delta_a")
EPS = 1e-6  # in the norm of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a linear layer beside its projections, float32."""

    conv: Tensor  # [columns, kernel]
    decay: Tensor  # [value heads], negative: log of the decay for a step of 1
    bias: Tensor  # [value heads], of the step
    norm: Tensor  # [Dv]


@dataclass(frozen=True, slots=True)
class DeltaPass:
    """Linear attention of one batch."""

    config: DecoderConfig
    net: DeltaNet
    pool: StatePool
    layout: DeltaLayout

    @staticmethod
    def of(config: DecoderConfig, batch: PackedBatch, pool: StatePool) -> "DeltaPass | None":
        """Prepare, once for all layers, what depends on lengths; None for a model without them."""
        if (net := config.delta_net) is None:
            return None
        device = next(iter(pool.matrices.values())).device
        return DeltaPass(config, net, pool, lay_out_states(batch, net.kernel, device))

    def run(self, layer: int, weights: DeltaWeights, product: Tensor) -> Tensor:
        """Return the outputs [T, values] of a layer's projections [T, ...], before the last one."""
        net, layout = self.net, self.layout
        ends = (product.shape[1] - 2 * net.num_value_heads, product.shape[1] - net.num_value_heads)
        mixed, gate, strength, step = product.tensor_split((net.convolved, *ends), dim=1)
        tails = self.pool.tails[layer]
        source = _with_tails(mixed, tails.index_select(0, layout.read))
        convolved = convolve(mixed, source, weights.conv, layout.taps)
        tails.index_copy_(0, layout.written, source[layout.taps.tails])
        rows = _Rows.of(net, weights, convolved, strength, step)
        matrices = self.pool.matrices[layer]
        out = _in_levels(layout, rows, matrices.index_select(0, layout.read), matrices)
        return _gated_norm(out, gate, weights.norm, self.config.rms_norm_eps).to(product.dtype)


def _with_tails(mixed: Tensor, tails: Tensor) -> Tensor:
    """Return the rows that `ConvolutionTaps` numbers: the batch's, the kept ones, zeros."""
    columns = mixed.shape[1]
    return torch.cat((mixed, tails.view(-1, columns), mixed.new_zeros(1, columns)))


def convolve(mixed: Tensor, source: Tensor, weight: Tensor, taps: ConvolutionTaps) -> Tensor:
    """Convolve the columns of mixed [T, C] causally along each row's own prompt; then SiLU.

    Returns:
        float32 [T + 1, C]; the last row is zeros.
    """
    rows, kernel = len(mixed), weight.shape[1]
    out = weight.new_zeros(rows + 1, weight.shape[0])
    for ago in range(kernel):  # as if all rows were one prompt
        out[ago:rows].addcmul_(mixed[: max(0, rows - ago)].float(), weight[:, kernel - 1 - ago])
    out[taps.heads] = torch.einsum("hkc,ck->hc", source[taps.taps].float(), weight)
    return functional.silu(out, inplace=True)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one layer, float32, the last of them zeros: it pads chunks and changes no state."""

    q: Tensor  # [T + 1, Hk, Dk], normed and scaled
    k: Tensor  # [T + 1, Hk, Dk], normed
    v: Tensor  # [T + 1, Hk, R, Dv]
    strength: Tensor  # [T + 1, Hk, R]
    decay: Tensor  # [T + 1, Hk, R], logarithms

    @staticmethod
    def of(
        net: DeltaNet, weights: DeltaWeights, convolved: Tensor, strength: Tensor, step: Tensor
    ) -> "_Rows":
        keys = net.num_key_heads * net.key_dim
        q, k, v = convolved.tensor_split((keys, 2 * keys), dim=1)
        q, k = (x.reshape(len(x), net.num_key_heads, net.key_dim) for x in (q, k))
        decay = weights.decay * functional.softplus(step.float() + weights.bias)
        return _Rows(
            q=_unit(q) * net.key_dim**-0.5,
            k=_unit(k),
            v=v.reshape(len(v), net.num_key_heads, -1, net.value_dim),
            strength=_padded(strength.float().sigmoid(), net),
            decay=_padded(decay, net),
        )

    def chunks(self, rows: Tensor) -> "_Chunks":
        """Return the rows [n, L] of chunks, head by head."""
        return _Chunks(
            q=self.q[rows].transpose(1, 2),
            k=self.k[rows].transpose(1, 2),
            v=self.v[rows].permute(0, 2, 3, 1, 4),
            strength=self.strength[rows].permute(0, 2, 3, 1),
            decay=self.decay[rows].permute(0, 2, 3, 1).cumsum(-1),
        )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _padded(x: Tensor, net: DeltaNet) -> Tensor:
    """Return x [T, value heads] with a row of zeros, as [T + 1, Hk, R]."""
    return functional.pad(x, (0, 0, 0, 1)).view(len(x) + 1, net.num_key_heads, -1)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunks of one group; `decay` is the logarithm since the chunk's beginning."""

    q: Tensor  # [n, Hk, L, Dk]
    k: Tensor  # [n, Hk, L, Dk]
    v: Tensor  # [n, Hk, R, L, Dv]
    strength: Tensor  # [n, Hk, R, L]
    decay: Tensor  # [n, Hk, R, L]

    def outputs(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and what the rows write, both [n, Hk, R, L, Dv].

        Args:
            state: [n, Hk, Dk, R Dv] before each chunk, or [1, ...] before all; None = zeros.
        """
        k, by_row = self.k, self.strength.unsqueeze(-1)
        future = torch.ones(2 * k.shape[2:3], dtype=torch.bool, device=k.device).triu(1)
        between = self.decay.unsqueeze(-1) - self.decay.unsqueeze(-2)
        between = between.masked_fill_(future, -torch.inf).exp_()  # [n, Hk, R, L, L]
        new, read = self.v, None
        if state is not None:
            of_keys, read = (x * self.decay.exp().unsqueeze(-1) for x in self._read(state))
            new = new - of_keys
        system = (k @ k.transpose(-1, -2)).unsqueeze(2) * between * by_row
        written = torch.linalg.solve_triangular(
            system, new * by_row, upper=False, unitriangular=True
        )
        scores = (self.q @ k.transpose(-1, -2)).unsqueeze(2) * between
        out = scores @ written
        return (out if read is None else out + read), written

    def _read(self, state: Tensor) -> Iterator[Tensor]:
        """Yield what keys and queries read from a state, [n, Hk, R, L, Dv] each."""
        n, heads, length, _ = self.k.shape
        both = torch.cat((self.k, self.q), dim=2)  # [n, Hk, 2 L, Dk]
        if len(state) == 1 and n > 1:  # one product for all siblings
            flat = both.transpose(0, 1).flatten(1, 2) @ state[0]
            found = flat.view(heads, n, 2 * length, -1).transpose(0, 1)
        else:
            found = both @ state
        by_value = found.reshape(n, heads, 2 * length, *self.v.shape[2::2]).transpose(2, 3)
        yield from by_value.tensor_split(2, dim=3)

    def ends(self, state: Tensor | None, written: Tensor, chosen: Tensor) -> Tensor:
        """Return the states [m, Hk, Dk, R Dv] after the chosen chunks."""
        decay, k = self.decay[chosen], self.k[chosen]
        total = decay[..., -1:]
        new = written[chosen] * (total - decay).exp().unsqueeze(-1)
        added = k.transpose(-1, -2) @ new.transpose(2, 3).flatten(-2)
        if state is None:
            return added
        before = state if len(state) == 1 else state[chosen]
        kept = total.exp().squeeze(-1).repeat_interleave(self.v.shape[-1], dim=-1)
        return torch.addcmul(added, before, kept.unsqueeze(2))


def _in_levels(layout: DeltaLayout, rows: _Rows, before: Tensor, matrices: Tensor) -> Tensor:
    """Run the levels; return all outputs [T, value heads, Dv].

    Args:
        layout: of the batch.
        rows: of the layer.
        before: [X, Hk, Dk, R Dv] the kept states that the first level reads.
        matrices: [slots, Hk, Dk, R Dv] where states are kept.
    """
    out = torch.empty_like(rows.v)
    for level in layout.levels:
        ends = [_run_group(group, rows, before, matrices, out) for group in level]
        before = ends[0] if len(ends) == 1 else torch.cat(ends)
    return out[:-1].flatten(1, 2)


def _run_group(
    group: ChunkGroup, rows: _Rows, before: Tensor, matrices: Tensor, out: Tensor
) -> Tensor:
    """Compute a group's outputs, and return the end states that are needed, keeping some."""
    chunks = rows.chunks(group.rows)
    state = None if group.sources is None else before[group.sources]
    found, written = chunks.outputs(state)
    out[group.rows] = found.permute(0, 3, 1, 2, 4)
    ends = chunks.ends(state, written, group.ends)
    places, slots = group.kept
    matrices.index_copy_(0, slots, ends[places])
    return ends


def _gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of each head of out [T, heads, Dv], times SiLU of the gate, [T, values]."""
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    return normed.flatten(1) * functional.silu(gate.float())
