"""Reads `DecoderWeights` from a model directory. safetensors only: no pickle, no remote code."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.common.hf_config import BIAS_COLUMNS, Mixture
from gpuscore.backends.common.quantization import Precision
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.backends.common.shards import ALL
from gpuscore.backends.torch.delta_net.layer import DELTA_PARTS, DeltaWeights
from gpuscore.backends.torch.group import RankGroup
from gpuscore.backends.torch.linear import (
    DenseLinear,
    LinearParts,
    LinearWeights,
    QuantizedLinear,
    SummedLinear,
    pack,
    stack,
)
from gpuscore.backends.torch.mixture import DenseExperts, MoEWeights, why_not_grouped
from gpuscore.backends.torch.weights import DecoderWeights, LayerWeights, MLPWeights
from gpuscore.errors import ConfigError
from gpuscore_kernels.quantized import spread


class WeightFormat(NamedTuple):
    """The dtype, device and precision of loaded weights."""

    dtype: torch.dtype
    device: torch.device
    precision: Precision = "full"  # of linear layers; "w8a16" dequantises quantised weights


def load_weights(
    directory: Path,
    architecture: Architecture,
    weight_format: WeightFormat,
    group: RankGroup | None = None,
) -> DecoderWeights:
    """Read and check all weights, or with `group` this rank's shard of them.

    Args:
        directory, architecture: the checkpoint, and what its config.json describes.
        weight_format: the dtype, device and precision of the result.
        group: the ranks that share the model.

    Raises:
        ConfigError: a file or tensor is missing, left over, of the wrong shape, or not finite.
    """
    shard = ALL if group is None else group.shard
    with CheckpointFiles(directory, architecture, "pt", shard) as files:
        return Checkpoint(files, architecture, weight_format, group).read()


class Checkpoint:
    """Reads a checkpoint's tensors one at a time, directly into the dtype of the model.

    Args:
        files, architecture: the open checkpoint, and what its config.json describes.
        weight_format, group: the arguments of `load_weights`.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        architecture: Architecture,
        weight_format: WeightFormat,
        group: RankGroup | None = None,
    ) -> None:
        self.files = files
        self.architecture = architecture
        self.group = group
        self.dtype, self.device, self.precision = weight_format

    def read(self) -> DecoderWeights:
        """Read all weights, and refuse a checkpoint that has further weights."""
        model = self.architecture.model_weights
        tied = self.architecture.config.tie_word_embeddings
        embed = self._tensor("embed", model["embed"])
        divisor = self.architecture.config.logits_divisor
        norm = self._tensor("final_norm", model["final_norm"])
        norm = norm if divisor == 1 else norm / divisor
        head = embed if tied else self._tensor("lm_head", model["lm_head"])
        inner: LinearWeights | None = None
        if "lm_head_bias" in model:
            bias = self._tensor("lm_head_bias", model["lm_head_bias"])
            head = torch.cat((head, bias[:, None], head.new_zeros(len(head), BIAS_COLUMNS - 1)), 1)
        if "head_inner" in model:
            parts = (self._tensor(part, model[part]) for part in ("head_inner", "head_inner_bias"))
            inner = DenseLinear(*parts)
            inner = pack(inner) if self.device.type == "cpu" else inner
        layers = tuple(map(self._layer, range(self.architecture.config.num_layers)))
        self.files.refuse_left_over(model["lm_head"] if tied else None)
        return DecoderWeights(embed, layers, norm, head, inner)

    def _layer(self, index: int) -> LayerWeights:
        self.files.reopen()
        linear = self.architecture.config.is_linear(index)
        return LayerWeights(
            input_layernorm=self._required(index, "input_norm"),
            qkv_proj=self._linear(index, *DELTA_PARTS) if linear else self._qkv(index),
            q_norm=self._norm_of_heads(index, "q_norm"),
            k_norm=self._norm_of_heads(index, "k_norm"),
            o_proj=(
                self._linear(index, "delta_o") if linear else self._summed(self._linear(index, "o"))
            ),
            post_self_attn_layernorm=self._part(index, "post_attention_norm"),
            post_attention_layernorm=self._required(index, "mlp_norm"),
            mlp=self._mlp(index),
            post_mlp_layernorm=self._part(index, "post_mlp_norm"),
            linear_attn=self._delta(index) if linear else None,
        )

    def _delta(self, index: int) -> DeltaWeights:
        """Read a linear-attention layer's weights except its projections, in float32."""

        def read_float32(part: str) -> Tensor:
            name = self.architecture.name(index, part)
            return _finite(f"tensor {name}", self.files.tensor(part, name).float()).to(self.device)

        return DeltaWeights(
            conv=read_float32("delta_conv").squeeze(1).T.contiguous(),
            decay=-read_float32("delta_log").exp(),
            bias=read_float32("delta_dt"),
            norm=read_float32("delta_norm"),
        )

    def _norm_of_heads(self, index: int, part: str) -> Tensor | None:
        weight = self._part(index, part)
        return weight if weight is None else self._paired(weight)

    def _mlp(self, index: int) -> MLPWeights | MoEWeights:
        mixture = self.architecture.config.mixture
        if mixture is not None and mixture.layers[index]:
            read = self._expert_linears if self.precision == "int8" else self._experts
            experts = read(mixture, index)
            return MoEWeights(mixture, self._required(index, "router"), experts, self.group)
        return MLPWeights(
            gate_up_proj=self._linear(index, "gate", "up"),
            down_proj=self._summed(self._linear(index, "down")),
        )

    def _summed(self, linear: LinearWeights) -> LinearWeights:
        """Return a layer that adds up the ranks' products, if several ranks share the model."""
        if self.group is None:
            return linear
        assert isinstance(linear, DenseLinear)  # noqa: S101  (the plan refuses 8-bit weights)
        adds_bias = self.group.shard.rank == 0  # else the sum would hold the bias several times
        part = linear if adds_bias else DenseLinear(linear.weight, None)
        return SummedLinear(part, self.group.sum)

    def _qkv(self, index: int) -> LinearWeights:
        """Read a layer's query, key and value projections as one.

        In the last layer the query projection is separate, because it is computed for scored rows
        only.
        """
        if index < self.architecture.config.num_layers - 1:
            return self._linear(index, "q", "k", "v")
        return LinearParts((self._linear(index, "q"), self._linear(index, "k", "v")))

    def _linear(self, index: int, *parts: str, expert: int | None = None) -> LinearWeights:
        """Read projections that have the same input, of a layer or an expert, as one."""
        linear = stack([self._one_linear(index, part, expert) for part in parts])
        return pack(linear) if self.device.type == "cpu" else linear

    def _one_linear(self, index: int, part: str, expert: int | None) -> LinearWeights:
        name = self._name(index, part, expert)
        bias = self._part(index, f"{part}_bias")
        if name is None:
            raise ConfigError(f"the weight table has no name for {part}")
        scale = self._scale(part, name)
        weight = self.files.tensor(part, name)
        if scale is not None and self.precision == "w8a16":
            return DenseLinear(self._dequantised(name, weight, scale), bias)
        if scale is None:  # this weight is not quantised in the checkpoint
            return DenseLinear(self._ordered(part, self._converted(name, weight)), bias)
        _finite(f"tensor {name}", weight.float())
        scale = scale.reshape(-1).expand(len(weight)).contiguous()
        return QuantizedLinear(weight, scale, bias)

    def _ordered(self, part: str, weight: Tensor) -> Tensor:
        """Reorder the rows of a q or k projection as `_paired` does; return others unchanged.

        If queries have output gates, the gates of all heads come first. In the checkpoint each
        head's gates follow its queries.
        """
        config = self.architecture.config
        if part == "k":
            return self._paired(weight)
        if part != "q" or not config.output_gate:
            return self._paired(weight) if part == "q" else weight
        queries, gates = weight.view(config.num_heads, 2, config.head_dim, -1).unbind(1)
        return torch.cat((gates.flatten(0, 1), self._paired(queries.flatten(0, 1))))

    def _paired(self, weight: Tensor) -> Tensor:
        """Reorder rows [H D, ...] for kernels, which rotate the pairs (i, i + D / 2) of each head.

        Checkpoints order them for the pairs (i, i + R / 2) of a head's first R numbers. If the
        whole head is rotated, R is D, and the order stays.
        """
        rotated = self.architecture.config.rotary_dim
        size = self.architecture.config.head_dim
        if rotated is None:
            return weight
        rotated_sides, others = torch.arange(size).tensor_split((rotated,))
        order = torch.cat((rotated_sides.view(2, -1), others.view(2, -1)), dim=1).flatten()
        heads = weight.view(-1, size, *weight.shape[1:])
        return heads[:, order.to(weight.device)].view(weight.shape)

    def _scale(self, part: str, name: str) -> Tensor | None:
        """Return the scale of a quantised weight in float32; None if it is not quantised."""
        scale: Tensor | None = self.files.scale(part, name)
        return None if scale is None else _finite(f"scale of {name}", scale.float())

    def _dequantised(self, name: str, weight: Tensor, scale: Tensor) -> Tensor:
        """Return weight times scale in the model's dtype, rounded once."""
        storage = self.files.storage
        assert storage is not None  # noqa: S101
        factors = spread(scale, weight) if storage.blocks else scale.reshape(-1, 1)
        tensor = (weight.float() * factors).to(self.dtype)
        return _finite(f"tensor {name}, times its scale,", tensor).to(self.device)

    def _experts(self, mixture: Mixture, index: int) -> DenseExperts:
        """Read all experts directly into stacked tensors, so that memory holds them only once."""
        shard = ALL if self.group is None else self.group.shard
        config = shard.part_of(self.architecture.config)
        shapes = weight_shapes(config)
        gate = shapes["expert_gate"]
        down = shapes["expert_down"]
        count = mixture.num_experts
        gate_up = torch.empty(count, 2 * gate[0], gate[1], dtype=self.dtype, device=self.device)
        down_all = torch.empty(count, *down, dtype=self.dtype, device=self.device)
        for expert in range(count):
            gate_up[expert, : gate[0]] = self._required(index, "expert_gate", expert)
            gate_up[expert, gate[0] :] = self._required(index, "expert_up", expert)
            down_all[expert] = self._required(index, "expert_down", expert)
        grouped = why_not_grouped(config, self.device, self.dtype) is None
        return DenseExperts(gate_up, down_all, grouped)

    def _expert_linears(
        self, mixture: Mixture, index: int
    ) -> tuple[tuple[LinearWeights, LinearWeights], ...]:
        """Read experts as linear layers."""
        return tuple(
            (
                self._linear(index, "expert_gate", "expert_up", expert=expert),
                self._linear(index, "expert_down", expert=expert),
            )
            for expert in range(mixture.num_experts)
        )

    def _name(self, index: int, part: str, expert: int | None = None) -> str | None:
        """Return the name of a part's tensor; None if the layer has no such part."""
        name = self.architecture.layer_weights[index].get(part)
        return None if name is None else self.architecture.name(index, part, expert)

    def _part(self, index: int, part: str, expert: int | None = None) -> Tensor | None:
        name = self._name(index, part, expert)
        if name is None:
            return None
        if (scale := self._scale(part, name)) is None:
            return self._tensor(part, name)
        return self._dequantised(name, self.files.tensor(part, name), scale)

    def _required(self, index: int, part: str, expert: int | None = None) -> Tensor:
        tensor = self._part(index, part, expert)
        if tensor is None:
            raise ConfigError(f"the weight table has no name for {part}")
        return tensor

    def _tensor(self, part: str, name: str) -> Tensor:
        return self._converted(name, self.files.tensor(part, name))

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        # Without a copy the tensor is memory of the mapped file, and would keep the file mapped.
        converted = tensor.to(self.dtype, copy=self.device.type == "cpu")
        return _finite(f"tensor {name}", converted).to(self.device)


def _finite(what: str, tensor: Tensor) -> Tensor:
    # `aminmax` returns NaN if any element is NaN. It is ten times as fast as `isfinite`.
    if not all(math.isfinite(end) for end in torch.aminmax(tensor)):
        raise ConfigError(f"{what} holds NaN or infinity in {tensor.dtype}")
    return tensor
