"""Quantised checkpoints: those of tests/fixtures/make, with what their libraries answer, and plain
ones whose weights are rounded here."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "quantized"
NAMES = tuple(sorted(path.parent.name for path in FOLDER.glob("*/expected.npz")))
FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


@dataclass(frozen=True)
class Recorded:
    """Hold prompts and float32 log-probabilities [prompts, vocabulary] of their last positions.

    `w8a8`: activations quantised, INT8 by max / 127. `w8a16`: weights dequantised, activations as
    they are. `own`: for INT8, with compressed-tensors' own range of -128..127, where no two
    computations break a row's tie alike; fixtures/make/answers.py says more."""

    directory: Path
    prompts: list[NDArray[np.int32]]
    w8a8: NDArray[np.float32]
    w8a16: NDArray[np.float32]
    own: NDArray[np.float32] | None


def recorded(name: str) -> Recorded:
    """Return the record of a checkpoint in tests/fixtures/quantized."""
    with np.load(FOLDER / name / "expected.npz") as record:
        prompts = np.split(record["ids"], np.cumsum(record["lengths"])[:-1])
        return Recorded(
            FOLDER / name,
            prompts,
            record["w8a8"],
            record["w8a16"],
            record.get("w8a8_own"),
        )


def section(kind: str) -> dict[str, Any]:
    """Return a section of config.json: a scale per row of a weight, and per token."""
    number = {"num_bits": 8, "symmetric": True, "type": "int" if kind == "int8" else "float"}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def quantised(directory: Path, made: Path, kind: str = "int8") -> Path:
    """Write a plain model to `made` with its layers' matrices in eight bits, as others would."""
    shutil.copytree(directory, made)
    dtype, most = FORMATS[kind]
    tensors = {}
    for path in sorted(made.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            if not name.endswith("proj.weight"):
                tensors[name] = weight
                continue
            scale = weight.float().abs().amax(dim=1, keepdim=True) / most
            rounded = (weight.float() / scale).clamp(-most, most)
            tensors[name] = (rounded.round() if kind == "int8" else rounded).to(dtype)
            tensors[f"{name}_scale"] = scale
        path.unlink()
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (made / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((made / "config.json").read_text()) | {"quantization_config": section(kind)}
    (made / "config.json").write_text(json.dumps(config))
    return made
