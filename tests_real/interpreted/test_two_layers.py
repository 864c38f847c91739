"""Promise: the Triton kernels give transformers' scores of the first two layers of the real model,
with its norm and its head of 49,152 tokens; in float32, because the interpreter multiplies bfloat16
numbers as bit patterns."""

import numpy as np

from gpuscore import Scorer
from gpuscore.backends.torch import backend
from gpuscore.measure.parity.models import CutModels
from reference import CLOSE, MODEL, TEXTS, Reference
from support.kernels import in_triton
from support.quick_interpreter import shorten, steady_products


def test_two_layers(tmp_path, monkeypatch):
    shorten(monkeypatch)
    steady_products(monkeypatch)
    for name in ("warmup_batches", "largest_batches", "largest_in_parts"):
        monkeypatch.setattr(backend, name, lambda *a, **how: iter(()))
    monkeypatch.setattr(backend.TorchBackend, "_check", lambda *_: None)
    directory = CutModels(MODEL, tmp_path).of(2)
    query, items = f"Question: {TEXTS[0].query}\nSentence: ", TEXTS[0].items[:3]
    labels = [" yes", " no", " not at all"]
    with Scorer(in_triton(directory, kv_cache_size=2**24)) as scorer:
        got = scorer.score(query, items, labels=labels, logprobs=True).logprobs
    reference = Reference(directory)
    expected = [reference.labels(reference.ids(query + item), labels) for item in items]
    np.testing.assert_allclose(got, expected, atol=CLOSE, rtol=0)
