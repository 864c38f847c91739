"""Reads `DecoderWeights` from a model directory; a weight of all layers becomes one array.

`KeptBytes` keeps the memory that a compiled program takes, for the next start.
"""

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.common.hf_config import BIAS_COLUMNS
from gpuscore.backends.common.quantization import BLOCK, LINEAR, Precision
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.backends.jax.decoder import DecoderWeights, LayerWeights
from gpuscore.backends.jax.products import Quantized
from gpuscore.errors import ConfigError

# For each field of `LayerWeights`, the parts of the checkpoint that it joins.
PARTS = {
    "input_layernorm": ("input_norm",),
    "qkv_proj": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
    "o_proj": ("o",),
    "o_bias": ("o_bias",),
    "post_attention_layernorm": ("mlp_norm",),
    "gate_up_proj": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
    "down_proj": ("down",),
    "down_bias": ("down_bias",),
}
# Parts of the first layer, if the label head has two.
INNER_HEAD_PARTS = ("head_inner", "head_inner_bias")


def load_weights(
    directory: Path,
    architecture: Architecture,
    dtype: str,
    device: jax.Device,
    precision: Precision = "full",
) -> DecoderWeights:
    """Read and check all weights.

    Args:
        directory, architecture: the checkpoint, and what its config.json describes.
        dtype: the dtype of the weights that are not in int8.
        device: where the weights are put.
        precision: "full"; "int8", which keeps quantised weights in int8; or "w8a16", which
            converts quantised weights to `dtype`.

    Raises:
        ConfigError: a file or tensor is missing, not used, of the wrong shape or not finite; or
            with "int8", a linear layer is not quantised.
    """
    with CheckpointFiles(directory, architecture, "np") as files:
        form = np.dtype(jnp.dtype(dtype))
        return _Reader(files, architecture, form, device, precision=precision).read()


def weight_shapes_of(
    architecture: Architecture, dtype: str, precision: Precision
) -> DecoderWeights:
    """Return the shapes and dtypes of what `load_weights` would return, without reading tensors."""
    config = architecture.config
    shapes = weight_shapes(architecture.config)

    def shaped(shape: tuple[int, ...], other: Any = None) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(other or dtype))

    def field(parts: tuple[str, ...]) -> Any:
        if parts[0] not in architecture.layer_weights[0]:
            return None
        first = shapes[parts[0]]
        rows = sum(shapes[part][0] for part in parts)
        shape = (config.num_layers, rows, *first[1:])
        if precision == "int8" and parts[0] in LINEAR:
            return Quantized(shaped(shape, jnp.int8), shaped(shape[:2], jnp.float32))
        return shaped(shape)

    layers = LayerWeights(**{name: field(parts) for name, parts in PARTS.items()})
    embed, norm = (shaped(shapes[part]) for part in ("embed", "final_norm"))
    head = shaped((config.label_rows, config.head_width))
    inner = [shaped(shapes[part]) for part in INNER_HEAD_PARTS if part in config.head_parts]
    return DecoderWeights(embed, layers, norm, head, *inner)


class _Reader:
    def __init__(
        self,
        files: CheckpointFiles,
        architecture: Architecture,
        dtype: np.dtype,
        device: jax.Device,
        precision: Precision,
    ) -> None:
        self.files = files
        self.architecture = architecture
        self.dtype = dtype
        self.device = device
        self.precision = precision

    def read(self) -> DecoderWeights:
        tied = self.architecture.config.tie_word_embeddings
        names = self.architecture.model_weights
        embed = self._put(self._tensor("embed", names["embed"]))
        weights = DecoderWeights(
            embed_tokens=embed,
            layers=LayerWeights(**{field: self._field(parts) for field, parts in PARTS.items()}),
            norm=self._put(self._tensor("final_norm", names["final_norm"])),
            lm_head=embed if tied else self._head(names),
            **{
                part: self._put(self._tensor(part, names[part]))
                for part in INNER_HEAD_PARTS
                if part in names
            },
        )
        self.files.refuse_left_over(names["lm_head"] if tied else None)
        return weights

    def _head(self, names: Mapping[str, str]) -> Array:
        head = self._tensor("lm_head", names["lm_head"])
        if "lm_head_bias" in names:
            bias = self._tensor("lm_head_bias", names["lm_head_bias"])
            head = np.pad(head, ((0, 0), (0, BIAS_COLUMNS)))
            head[:, -BIAS_COLUMNS] = bias
        return self._put(head)

    def _field(self, parts: tuple[str, ...]) -> Any:
        """Read one field of `LayerWeights` for all layers; None if the model does not have it."""
        if parts[0] not in self.architecture.layer_weights[0]:
            return None
        in_int8 = self.precision == "int8" and parts[0] in LINEAR
        return self._quantized(parts) if in_int8 else self._stacked(parts)

    def _stacked(self, parts: tuple[str, ...]) -> Array:
        """Stack parts of all layers; the host holds a copy until the device has them."""
        first = self._one(parts, 0)
        count = self.architecture.config.num_layers
        every = np.empty((count, *first.shape), self.dtype)
        every[0] = first
        for layer in range(1, count):
            every[layer] = self._one(parts, layer)
        return self._put(every)

    def _quantized(self, parts: tuple[str, ...]) -> Quantized:
        """Stack the int8 weights of all layers, and their scales."""
        pairs = [
            self._one_quantized(parts, layer)
            for layer in range(self.architecture.config.num_layers)
        ]
        weights, scales = zip(*pairs, strict=True)
        return Quantized(self._put(np.stack(weights)), self._put(np.stack(scales)))

    def _one_quantized(self, parts: tuple[str, ...], layer: int) -> tuple[np.ndarray, np.ndarray]:
        weights, scales = zip(*(self._in_int8(part, layer) for part in parts), strict=True)
        return np.concatenate(weights), np.concatenate(scales)

    def _one(self, parts: tuple[str, ...], layer: int) -> np.ndarray:
        return np.concatenate([self._tensor(part, self._name(part, layer)) for part in parts])

    def _in_int8(self, part: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Read a weight in int8 [O, K] and its scales [O]."""
        name = self._name(part, layer)
        scale = self.files.scale(part, name)
        weight = self.files.tensor(part, name)
        if scale is None:
            raise ConfigError(
                f"tensor {name} is not quantised, but other tensors of the checkpoint are; "
                "--backend jax needs all of them quantised; supported: --quantization w8a16"
            )
        wide = _finite(name, scale.astype(np.float32).reshape(-1))
        return weight, np.broadcast_to(wide, len(weight))

    def _name(self, part: str, layer: int) -> str:
        return self.architecture.name(layer, part)

    def _tensor(self, part: str, name: str) -> np.ndarray:
        with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused below
            stored = self.files.tensor(part, name)
            scale = self.files.scale(part, name)
            tensor = (stored if scale is None else self._dequantised(stored, scale)).astype(
                self.dtype
            )
        return _finite(name, tensor)

    def _dequantised(self, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return weight times scale in float32."""
        wide = scale.astype(np.float32)
        rows = len(weight)
        if weight.dtype == np.uint8:
            weight = weight.view(jnp.float8_e4m3fn)
        if self.files.storage is not None and self.files.storage.blocks:
            every = wide.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, : weight.shape[1]]
        else:
            every = wide.reshape(-1, 1)
        return np.asarray(weight.astype(np.float32) * every)

    def _put(self, values: np.ndarray) -> Array:
        return jax.device_put(values, self.device)


def _finite(name: str, tensor: np.ndarray) -> np.ndarray:
    if not np.isfinite(tensor.astype(np.float32)).all():
        raise ConfigError(f"tensor {name}, or its scale, holds NaN or infinity in {tensor.dtype}")
    return tensor


logger = logging.getLogger(__name__)


class KeptBytes:
    """The file that holds how much memory a compiled program takes; the next start plans with it.

    Args:
        directory: where JAX keeps compiled programs; None = keep nothing.
        identity: everything that the number of bytes depends on.
    """

    def __init__(self, directory: str | None, identity: str) -> None:
        name = f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}-bytes"
        self._path = None if directory is None else Path(directory) / name

    def read(self) -> int | None:
        """Return the kept number of bytes; None if there is none."""
        if self._path is None or not self._path.exists():
            return None
        text = self._path.read_text(encoding="ascii", errors="replace")
        return int(text) if text.isdecimal() else None

    def write(self, count: int) -> None:
        """Keep the number of bytes; log a warning if the file cannot be written."""
        if self._path is None:
            return
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(str(count), encoding="ascii")
            part.replace(self._path)
        except OSError as error:
            logger.warning(
                "JAX_COMPILATION_CACHE_DIR: the size of a program is not kept: %s", error
            )
