"""Hugging Face directory -> `DecoderWeights`. safetensors only: no pickle, no remote code."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpuscore.backends.torch.hf_config import Mixture
from gpuscore.backends.torch.models import Family
from gpuscore.backends.torch.models.decoder import (
    DecoderWeights,
    LayerWeights,
    MixtureWeights,
    MlpWeights,
    weight_shapes,
)
from gpuscore.errors import ConfigError


class ReadPart(Protocol):
    """Reads a part of one layer, of one of its experts if it says so; None if it has none."""

    def __call__(self, part: str, expert: int | None = None) -> Tensor | None: ...


# Buffers that old checkpoints carry and that are computed here instead.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


def load_weights(
    directory: Path, family: Family, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Read and check all weights.

    Raises:
        ConfigError: a file or tensor is missing, left over, of the wrong shape, or not finite.
    """
    with ExitStack() as stack:
        files = _open_files(directory, stack)
        return _Checkpoint(files, family, dtype, device).read()


class _Checkpoint:
    """Named tensors of all shards, read one at a time straight into the wanted dtype."""

    def __init__(
        self, files: dict[str, Any], family: Family, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.family, self.dtype, self.device = family, dtype, device
        self.shapes = weight_shapes(family.config)
        self.file_of = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        self.used: set[str] = set()

    def read(self) -> DecoderWeights:
        tied = self.family.config.tie_word_embeddings
        model = self.family.model_weights
        embed = self._tensor("embed", model["embed"])
        weights = DecoderWeights(
            embed=embed,
            layers=tuple(map(self._layer, range(self.family.config.num_layers))),
            final_norm=self._tensor("final_norm", model["final_norm"]),
            lm_head=embed if tied else self._tensor("lm_head", model["lm_head"]),
        )
        if tied:
            self.used.add(model["lm_head"])  # some checkpoints store the tied copy as well
        self._refuse_left_over()
        return weights

    def _layer(self, index: int) -> LayerWeights:
        def read(part: str, expert: int | None = None) -> Tensor | None:
            name = self.family.layer_weights[index].get(part)
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
        mixture = self.family.config.mixture
        if mixture is not None and mixture.layers[index]:
            return self._mixture(read, mixture)
        return MlpWeights(
            gate_up=_stacked(read, ("gate", "up")),
            gate_up_bias=_stacked_or_none(read, ("gate_bias", "up_bias")),
            down=_required(read, "down"),
            down_bias=read("down_bias"),
        )

    def _mixture(self, read: ReadPart, mixture: Mixture) -> MixtureWeights:
        """Experts go straight into the stacked tensors, so that none is in memory twice."""
        gate, down = self.shapes["expert_gate"], self.shapes["expert_down"]
        count = mixture.num_experts
        gate_up = torch.empty(count, 2 * gate[0], gate[1], dtype=self.dtype, device=self.device)
        down_all = torch.empty(count, *down, dtype=self.dtype, device=self.device)
        for expert in range(count):
            gate_up[expert, : gate[0]] = _required(read, "expert_gate", expert)
            gate_up[expert, gate[0] :] = _required(read, "expert_up", expert)
            down_all[expert] = _required(read, "expert_down", expert)
        return MixtureWeights(mixture, _required(read, "router"), gate_up, down_all)

    def _tensor(self, part: str, name: str) -> Tensor:
        if name not in self.file_of:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        self.used.add(name)
        tensor: Tensor = self.file_of[name].get_tensor(name)
        if tensor.shape != self.shapes[part]:
            raise ConfigError(
                f"tensor {name} has shape {list(tensor.shape)}, "
                f"config.json asks for {list(self.shapes[part])}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ConfigError(
                f"tensor {name} is {tensor.dtype}; supported: bfloat16, float16, float32"
            )
        tensor = tensor.to(self.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"tensor {name} holds NaN or infinity in {self.dtype}")
        return tensor.to(self.device)

    def _refuse_left_over(self) -> None:
        left = [
            name for name in self.file_of if name not in self.used and not name.endswith(_COMPUTED)
        ]
        if left:
            raise ConfigError(
                f"the checkpoint holds {len(left)} tensors that "
                f"{self.family.config.architecture} does not use, such as {min(left)}"
            )


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


def _open_files(directory: Path, stack: ExitStack) -> dict[str, Any]:
    files = {}
    for path in _weight_files(directory):
        try:
            files[path.name] = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
    return files


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return [single]
        raise ConfigError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json; "
            "supported: safetensors"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ConfigError(f"{index} names {name!r}, which is not a file of {directory}")
    return [directory / name for name in names]
