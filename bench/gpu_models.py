"""A checkpoint of FP8 weights, as llmcompressor writes it, from a random model of `make_model`."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_ROWS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _ROWS | {"strategy": "channel", "dynamic": False},
            "input_activations": _ROWS | {"strategy": "token", "dynamic": True},
        }
    },
}


def make_fp8(source: Path) -> Path:
    """Return a directory beside `source` whose projections are in FP8 by rows, made once."""
    directory = source.with_name(f"{source.name}-fp8")
    if (directory / "config.json").is_file():
        return directory
    directory.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for path in source.glob("generation_config.json"):
        shutil.copy(path, directory)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (directory / "config.json").write_text(json.dumps(config))
    return directory
