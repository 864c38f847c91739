"""Linear layers over one batch: their weights, and the function that computes their outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import DecoderConfig, DeltaNet
from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.delta_net.layout import DeltaLayout, lay_out_states
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.types.batch import PackedBatch
from gpuscore_kernels.delta_net.reference import convolve, delta_chunks, gated_norm

# The projections of a layer, in the order in which their results stand side by side: queries, keys
# and values; the gate of the output; the strength and the decay of each value head.
DELTA_PARTS = ("delta_qkv", "delta_z", "delta_b", "delta_a")


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a linear layer beside its projections, float32."""

    conv: Tensor  # [kernel, columns]
    decay: Tensor  # [value heads], negative: log of the decay for a step of 1
    bias: Tensor  # [value heads], of the step
    norm: Tensor  # [Dv]


class LinearAttention:
    """Linear layers of one model over one pool of states.

    Args:
        config: of the model.
        pool: its states.
        compiler: makes the functions of `gpuscore_kernels.delta_net` fast.
    """

    def __init__(
        self, config: DecoderConfig, pool: StatePool, compiler: Compiler = eagerly
    ) -> None:
        self.config, self.pool = config, pool
        if config.delta_net is not None:
            self.convolve = compiler(convolve)
            self.chunks = compiler(delta_chunks)
            self.gated_norm = compiler(gated_norm)

    def prepare(self, batch: PackedBatch) -> "LinearPass | None":
        """Prepare, once for all layers, what depends on lengths; None for a model without them."""
        if (net := self.config.delta_net) is None:
            return None
        device = next(iter(self.pool.matrices.values())).device
        return LinearPass(self, net, lay_out_states(batch, net.kernel, device))


@dataclass(frozen=True, slots=True)
class LinearPass:
    """Linear attention of one batch."""

    model: LinearAttention
    net: DeltaNet
    layout: DeltaLayout

    def run(self, layer: int, weights: DeltaWeights, product: Tensor) -> Tensor:
        """Return the outputs [T, values] of a layer's projections [T, ...], before the last one."""
        net, layout, pool = self.net, self.layout, self.model.pool
        ends = (product.shape[1] - 2 * net.num_value_heads, product.shape[1] - net.num_value_heads)
        mixed, gate, strength, step = product.tensor_split((net.convolved, *ends), dim=1)
        tails = pool.tails[layer]
        read = tails.index_select(0, layout.read).flatten(0, 1)
        extra = torch.cat((read, read.new_zeros(1, net.convolved)))
        keys = net.num_key_heads * net.key_dim
        convolved = self.model.convolve(
            mixed, extra, layout.places, weights.conv, keys, net.key_dim
        )
        if len(layout.written):
            tails.index_copy_(0, layout.written, _rows_at(mixed, extra, layout.tails))
        decay = weights.decay * functional.softplus(step.float() + weights.bias)
        by_head = _padded(strength.float().sigmoid()), _padded(decay)
        out = self._in_levels(layer, convolved, *by_head)
        done: Tensor = self.model.gated_norm(
            out, gate, weights.norm, self.model.config.rms_norm_eps
        )
        return done

    def _in_levels(self, layer: int, convolved: Tensor, strength: Tensor, decay: Tensor) -> Tensor:
        """Run the levels, and keep states; return the outputs [T, value heads, Dv]."""
        matrices = self.model.pool.matrices[layer]
        before = matrices.index_select(0, self.layout.read)
        out = convolved.new_empty(len(convolved), self.net.num_value_heads, self.net.value_dim)
        for level in self.layout.levels:
            of_groups = []
            for group in level:
                which = group.rows, group.sources, group.ends
                ends = self.model.chunks(convolved, strength, decay, *which, before, out)
                places, slots = group.kept
                if len(slots):
                    matrices.index_copy_(0, slots, ends[places])
                of_groups.append(ends)
            before = of_groups[0] if len(of_groups) == 1 else torch.cat(of_groups)
        return out[:-1]


def _rows_at(mixed: Tensor, extra: Tensor, places: Tensor) -> Tensor:
    """Return the rows at places [k, n] of both together, [k, n, columns]."""
    inside = places < len(mixed)
    own = mixed[places.where(inside, 0)]
    return own.where(inside.unsqueeze(-1), extra[(places - len(mixed)).clamp(min=0)])


def _padded(x: Tensor) -> Tensor:
    """Return x [T, heads] with a row of zeros at the end."""
    return functional.pad(x, (0, 0, 0, 1))
