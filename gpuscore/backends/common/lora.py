"""Merging a LoRA adapter (Hu et al., 2021) into a checkpoint's weights as they are read.

A weight W becomes W + scale * B A, in float32, as peft's `merge_and_unload` computes it; scale is
alpha / r, or alpha / sqrt(r) for rank-stabilised adapters (Kalajdzievski, 2023).
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.adapter import CONFIG, PREFIX, WEIGHTS
from gpuscore.models.files import as_object, read_object, shown

# Ends of names in an adapter's file -> the matrix that the tensor is.
_ENDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "embedding A",
    ".lora_embedding_B": "embedding B",
    ".base_layer.weight": "whole",
    ".weight": "whole",
}


class LoraAdapter:
    """The tensors of an adapter, by the names of the checkpoint's weights that they change.

    Args:
        directory: has the adapter's two files.
        file: the adapter's open file; replaced when it is opened again.
        shapes: the shapes of the checkpoint's weights, by name.

    Raises:
        ConfigError: a tensor is of another kind, belongs to no weight, or has the wrong shape.
    """

    def __init__(self, directory: Path, file: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._settings = read_object(directory / CONFIG) or {}
        self.file = file
        self._path = directory / WEIGHTS
        self._keys: dict[str, dict[str, str]] = {}
        for key in file.keys():  # noqa: SIM118
            end = next((end for end in _ENDS if key.endswith(end)), None)
            name = f"{key.removeprefix(PREFIX).removesuffix(end or '')}.weight"
            if end is None or name not in shapes:
                raise ConfigError(
                    f"{self._path} has {shown(key)}, which is no part of a LoRA adapter of this "
                    "model; supported: lora_A and lora_B of its linear layers and embeddings, and "
                    "whole weights in their place"
                )
            self._keys.setdefault(name, {})[_ENDS[end]] = key
        for name, keys in self._keys.items():
            self._check(name, keys, shapes[name])

    def _check(self, name: str, keys: Mapping[str, str], shape: tuple[int, ...]) -> None:
        shapes = {kind: tuple(self.file.get_slice(key).get_shape()) for kind, key in keys.items()}
        expected = {"whole": shape}
        for kind, (rows, columns) in {"": shape[:2], "embedding ": shape[1::-1]}.items():
            if f"{kind}A" in shapes or f"{kind}B" in shapes:
                rank = shapes.get(f"{kind}A", (0,))[0]
                expected |= {f"{kind}A": (rank, columns), f"{kind}B": (rows, rank)}
        for kind in expected.keys() & shapes.keys() | (expected.keys() - {"whole"}):
            if shapes.get(kind) != expected[kind]:
                found = "is missing" if kind not in shapes else f"is {list(shapes[kind])}"
                raise ConfigError(
                    f"{self._path}: {kind} of {name} {found}; the base model's weight is "
                    f"{list(shape)}, so {list(expected[kind])} is needed"
                )

    @property
    def whole(self) -> dict[str, str]:
        """The adapter's names of the whole weights that replace the base model's."""
        return {name: keys["whole"] for name, keys in self._keys.items() if "whole" in keys}

    def change(self, name: str, wide: Any) -> Any | None:
        """Return scale * B A in the shape of the weight, float32; None = the weight stays as it is.

        Args:
            name: the checkpoint's name of the weight.
            wide: turns a tensor into float32.
        """
        keys = self._keys.get(name, {})
        kind = "embedding " if "embedding A" in keys else ""
        if f"{kind}A" not in keys:
            return None
        a, b = (wide(self.file.get_tensor(keys[f"{kind}{matrix}"])) for matrix in "AB")
        delta = (b @ a) * self._scale(name.removesuffix(".weight"), len(a))
        return delta.T if kind else delta

    def _scale(self, module: str, rank: int) -> float:
        patterns = as_object(self._settings.get("alpha_pattern") or {}, f"{CONFIG}: alpha_pattern")
        alpha = next(
            (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)),
            self._settings.get("lora_alpha", 8),
        )
        if type(alpha) not in (int, float):
            raise ConfigError(f"{CONFIG}: lora_alpha must be a number, found {shown(alpha)}")
        return float(alpha) / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)
