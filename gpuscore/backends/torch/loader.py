"""Reads `DecoderWeights` from a model directory. safetensors only: no pickle, no remote code."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.common.hf_config import Mixture
from gpuscore.backends.torch.decoder import DecoderWeights, LayerWeights, MlpWeights
from gpuscore.backends.torch.mixture import MixtureWeights
from gpuscore.errors import ConfigError


class ReadPart(Protocol):
    """Reads a part of one layer, or of one of its experts; None if the layer has no such part."""

    def __call__(self, part: str, expert: int | None = None) -> Tensor | None: ...


def load_weights(
    directory: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Read and check all weights.

    Raises:
        ConfigError: a file or tensor is missing, left over, of the wrong shape, or not finite.
    """
    with CheckpointFiles(directory, architecture, "pt") as files:
        return _Checkpoint(files, architecture, dtype, device).read()


class _Checkpoint:
    """Reads a checkpoint's tensors one at a time, directly into the wanted dtype."""

    def __init__(
        self,
        files: CheckpointFiles,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.files, self.architecture, self.dtype, self.device = files, architecture, dtype, device

    def read(self) -> DecoderWeights:
        tied = self.architecture.config.tie_word_embeddings
        model = self.architecture.model_weights
        embed = self._tensor("embed", model["embed"])
        weights = DecoderWeights(
            embed=embed,
            layers=tuple(map(self._layer, range(self.architecture.config.num_layers))),
            final_norm=self._tensor("final_norm", model["final_norm"]),
            lm_head=embed if tied else self._tensor("lm_head", model["lm_head"]),
        )
        self.files.refuse_left_over(model["lm_head"] if tied else None)
        return weights

    def _layer(self, index: int) -> LayerWeights:
        def read(part: str, expert: int | None = None) -> Tensor | None:
            name = self.architecture.layer_weights[index].get(part)
            if name is None:
                return None
            return self._tensor(part, f"model.layers.{index}.{name.format(expert=expert)}")

        return LayerWeights(
            input_norm=_required(read, "input_norm"),
            qkv=_stacked(read, ("q", "k", "v")),
            qkv_bias=_stacked_or_none(read, ("q_bias", "k_bias", "v_bias")),
            q_norm=read("q_norm"),
            k_norm=read("k_norm"),
            o=_required(read, "o"),
            o_bias=read("o_bias"),
            post_attention_norm=read("post_attention_norm"),
            mlp_norm=_required(read, "mlp_norm"),
            mlp=self._mlp(read, index),
            post_mlp_norm=read("post_mlp_norm"),
        )

    def _mlp(self, read: ReadPart, index: int) -> MlpWeights | MixtureWeights:
        mixture = self.architecture.config.mixture
        if mixture is not None and mixture.layers[index]:
            return self._mixture(read, mixture)
        return MlpWeights(
            gate_up=_stacked(read, ("gate", "up")),
            gate_up_bias=_stacked_or_none(read, ("gate_bias", "up_bias")),
            down=_required(read, "down"),
            down_bias=read("down_bias"),
        )

    def _mixture(self, read: ReadPart, mixture: Mixture) -> MixtureWeights:
        """Read experts directly into the stacked tensors, so that they are not in memory twice."""
        shapes = self.files.shapes
        gate, down = shapes["expert_gate"], shapes["expert_down"]
        count = mixture.num_experts
        gate_up = torch.empty(count, 2 * gate[0], gate[1], dtype=self.dtype, device=self.device)
        down_all = torch.empty(count, *down, dtype=self.dtype, device=self.device)
        for expert in range(count):
            gate_up[expert, : gate[0]] = _required(read, "expert_gate", expert)
            gate_up[expert, gate[0] :] = _required(read, "expert_up", expert)
            down_all[expert] = _required(read, "expert_down", expert)
        return MixtureWeights(mixture, _required(read, "router"), gate_up, down_all)

    def _tensor(self, part: str, name: str) -> Tensor:
        tensor: Tensor = self.files.tensor(part, name).to(self.dtype)
        # NaN passes through both. Ten times as fast as `isfinite` of every element.
        if not all(math.isfinite(end) for end in torch.aminmax(tensor)):
            raise ConfigError(f"tensor {name} holds NaN or infinity in {self.dtype}")
        return tensor.to(self.device)


def _required(read: ReadPart, part: str, expert: int | None = None) -> Tensor:
    tensor = read(part, expert)
    if tensor is None:
        raise ConfigError(f"the weight table has no name for {part}")
    return tensor


def _stacked(read: ReadPart, parts: Iterable[str]) -> Tensor:
    return torch.cat([_required(read, part) for part in parts])


def _stacked_or_none(read: ReadPart, parts: tuple[str, ...]) -> Tensor | None:
    tensors = [tensor for part in parts if (tensor := read(part)) is not None]
    return torch.cat(tensors) if len(tensors) == len(parts) else None
