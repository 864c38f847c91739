"""Promise: the bench of JAX's memory on CUDA runs, here for a CPU, and its figures follow from the
model's sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from support.backends import needs_jax

BENCH = Path(__file__).parents[2] / "bench" / "jax_cuda.py"
PAGES, PAGE, BFLOAT16 = 900, 64, 2


@needs_jax
def test_figures(tiny_model):
    directory, _ = tiny_model("qwen3")
    sizes = ["--tokens", "64", "--max-model-len", "64", "--pages", str(PAGES)]
    printed = subprocess.run(
        [sys.executable, "-P", BENCH, directory, *sizes, "--device", "cpu"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    named = re.findall(r"(?:^(\w+): )?(\w[a-z ]*) ([\d,]+\.\d) MiB", printed, re.MULTILINE)
    figures = [(part, name, float(figure.replace(",", ""))) for part, name, figure in named]
    config = json.loads((directory / "config.json").read_text())
    of_token = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    weights = load_file(directory / "model.safetensors")
    pool = mebibytes(2 * of_token * PAGES * PAGE * BFLOAT16)
    assert pool > 1
    assert (
        "",
        "weights",
        mebibytes(sum(x.numel() for x in weights.values()) * BFLOAT16),
    ) in figures
    assert ("", "pool", pool) in figures
    assert ("", "in place", pool) in figures, "a batch's program copies no page"
    assert figures[-1] == ("", "in place", 0.0), "nor does the labels'"
    assert [name for part, name, _ in figures if part] == ["temporary", "temporary"]
    assert all(figure < pool for _, name, figure in figures if name in ("temporary", "results"))


def mebibytes(count):
    return round(count / 2**20, 1)
