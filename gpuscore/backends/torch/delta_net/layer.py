"""Linear layers over one batch: their weights, and the function that computes their outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.delta_net import layout
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.backends.torch.words import ArraySpec
from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels import Implementation
from gpuscore_kernels.delta_net import Walks
from gpuscore_kernels.delta_net.reference import convolve, delta_rule, gated_norm, keep_tails

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


class DeltaNetBackend:
    """Linear layers of one model over one pool of states.

    Args:
        config: describes the model, which has linear layers.
        pool: its states.
        compiler: makes the functions of `gpuscore_kernels.delta_net` fast.
        impl: "triton" if siblings share chunks, as its kernels need.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pool: StatePool,
        compiler: Compiler = eagerly,
        impl: Implementation = "reference",
    ) -> None:
        assert config.delta_net is not None  # noqa: S101  (the caller has checked)
        self.config = config
        self.net = config.delta_net
        self.pool = pool
        self._merge_siblings = impl == "triton"
        self.convolve = compiler(convolve)
        self.keep_tails = compiler(keep_tails)
        self.rule = compiler(delta_rule)
        self.gated_norm = compiler(gated_norm)

    def tables(self, batch: PackedBatch) -> list[Int32Array]:
        """Return what depends on lengths, for all layers."""
        return layout.lay_out_states(batch, self.net.kernel, self._merge_siblings)

    def table_specs(self, tokens: int, scored: int) -> list[ArraySpec]:
        """Return the largest shapes of the tables in a CUDA graph."""
        return layout.table_specs(tokens, scored, self.net.kernel)

    def planned(self, tables: Sequence[Tensor]) -> "DeltaNetPass":
        """Return the layers over tables that are on the device already."""
        places, kept, chunks, begins, held, *walks = tables
        walked = Walks(chunks, tuple(walks), begins, held.shape[0])
        return DeltaNetPass(self, places, kept, walked)

    def prepare(self, batch: PackedBatch) -> "DeltaNetPass":
        """Prepare, once for all layers, what depends on lengths."""
        device = next(iter(self.pool.matrices.values())).device
        return self.planned([torch.from_numpy(x).to(device) for x in self.tables(batch)])


@dataclass(frozen=True, slots=True)
class DeltaNetPass:
    """Linear attention of one batch."""

    model: DeltaNetBackend
    places: Tensor
    kept: Tensor
    walks: Walks

    def run(self, layer: int, weights: DeltaWeights, projected: Tensor) -> Tensor:
        """Return a layer's outputs [T, values], before its last projection; `projected` [T, ...]
        holds the results of `DELTA_PARTS`."""
        model = self.model
        net = model.net
        tails = model.pool.tails[layer]
        ends = net.convolved, projected.shape[1] - 2 * net.num_value_heads
        qkv, z, b_and_a = projected.tensor_split(ends, dim=1)
        convolved = model.convolve(
            qkv,
            tails,
            self.places,
            weights.conv,
            keys=net.num_key_heads * net.key_dim,
            size=net.key_dim,
        )
        if self.kept.shape[0] > 1:
            model.keep_tails(qkv, tails, self.kept)
        out = model.rule(
            convolved,
            b_and_a,
            weights.decay,
            weights.bias,
            self.walks,
            model.pool.matrices[layer],
        )
        return model.gated_norm(out, z, weights.norm, model.config.rms_norm_eps)
