"""Reads `Weights` from a model directory, with the layers' weights of one kind stacked."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.jax.decoder import Layer, Weights
from gpuscore.errors import ConfigError

# Field of `Layer` -> the parts of the checkpoint that are stacked in it.
PARTS = {
    "input_norm": ("input_norm",),
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
    "o": ("o",),
    "o_bias": ("o_bias",),
    "mlp_norm": ("mlp_norm",),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
    "down": ("down",),
    "down_bias": ("down_bias",),
}


def load_weights(
    directory: Path, architecture: Architecture, dtype: str, device: jax.Device
) -> Weights:
    """Read and check all weights.

    Raises:
        ConfigError: a file or tensor is missing, left over, of the wrong shape, or not finite.
    """
    with CheckpointFiles(directory, architecture, "np") as files:
        return _Reader(files, architecture, np.dtype(jnp.dtype(dtype)), device).read()


class _Reader:
    def __init__(
        self,
        files: CheckpointFiles,
        architecture: Architecture,
        dtype: np.dtype,
        device: jax.Device,
    ) -> None:
        self.files, self.architecture, self.dtype, self.device = files, architecture, dtype, device

    def read(self) -> Weights:
        tied, names = self.architecture.config.tie_word_embeddings, self.architecture.model_weights
        embed = self._put(self._tensor("embed", names["embed"]))
        layers: dict[str, Any] = {field: self._stacked(field) for field in PARTS}
        weights = Weights(
            embed=embed,
            layers=Layer(**layers),
            final_norm=self._put(self._tensor("final_norm", names["final_norm"])),
            lm_head=embed if tied else self._put(self._tensor("lm_head", names["lm_head"])),
        )
        self.files.refuse_left_over(names["lm_head"] if tied else None)
        return weights

    def _stacked(self, field: str) -> Array | None:
        """Stack a field over all layers; a second copy exists while it is moved to the device."""
        first, count = self._one(field, 0), self.architecture.config.num_layers
        if first is None:
            return None
        every = np.empty((count, *first.shape), self.dtype)
        every[0] = first
        for layer in range(1, count):
            every[layer] = self._one(field, layer)
        return self._put(every)

    def _one(self, field: str, layer: int) -> np.ndarray | None:
        """Concatenate the parts of a field; None if the model has none of them."""
        table = self.architecture.layer_weights[layer]
        if PARTS[field][0] not in table:
            return None
        names = ((part, f"model.layers.{layer}.{table[part]}") for part in PARTS[field])
        return np.concatenate([self._tensor(part, name) for part, name in names])

    def _tensor(self, part: str, name: str) -> np.ndarray:
        with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused below
            tensor = self.files.tensor(part, name).astype(self.dtype)
        if not np.isfinite(tensor.astype(np.float32)).all():
            raise ConfigError(f"tensor {name} holds NaN or infinity in {self.dtype}")
        return np.asarray(tensor)

    def _put(self, values: np.ndarray) -> Array:
        return jax.device_put(values, self.device)
