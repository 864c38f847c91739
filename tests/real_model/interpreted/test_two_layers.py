"""Promise: the Triton kernels give transformers' scores of the first two layers of the real model,
with its norm and its head of 49,152 tokens; in float32, because the interpreter multiplies bfloat16
numbers as bit patterns."""

import json
import re

import numpy as np
from safetensors.torch import load_file, save_file

from gpuscore import Scorer
from gpuscore.backends.torch import backend
from reference import CLOSE, MODEL, TEXTS, Reference
from support.kernels import in_triton
from support.quick_interpreter import shorten, steady_products


def write_first_layers(count, folder):
    """Write the real model with its first layers only."""
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    kept = {}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < count:
            kept[name] = tensor
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    for path in MODEL.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).symlink_to(path.resolve())


def test_two_layers(tmp_path, monkeypatch):
    shorten(monkeypatch)
    steady_products(monkeypatch)
    for name in ("warmup_batches", "largest_batches", "largest_in_parts"):
        monkeypatch.setattr(backend, name, lambda *a, **how: iter(()))
    monkeypatch.setattr(backend, "check_start", lambda *_: None)
    write_first_layers(2, tmp_path)
    query, items = f"Question: {TEXTS[0].query}\nSentence: ", TEXTS[0].items[:3]
    labels = [" yes", " no", " not at all"]
    with Scorer(in_triton(tmp_path, kv_cache_size=2**24)) as scorer:
        got = scorer.score(query, items, labels=labels, logprobs=True).logprobs
    reference = Reference(tmp_path)
    expected = [reference.labels(reference.ids(query + item), labels) for item in items]
    np.testing.assert_allclose(got, expected, atol=CLOSE, rtol=0)
