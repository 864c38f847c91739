"""Promise: a quantised model that has collapsed is refused at start, and every other one starts."""

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.base import Prepared
from gpuscore.backends.torch.linear import exact_on_this_cpu
from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.engine.start_checks import LENGTHS, check_collapse, known_labels, known_prompts
from gpuscore.errors import ConfigError
from gpuscore.exits import EXIT_OK
from gpuscore.processes.worker import child
from gpuscore.processes.worker.wire import (
    FromChild,
    Pipe,
    Placement,
    Ready,
    Refused,
    Start,
    decoder,
    encode,
)
from gpuscore.types.batch import BackendLimits
from support.backends import needs_jax
from support.eight_bits import needs_int8
from support.models import CLASSIFIERS, FAMILIES, make_tokenizer
from support.quantized import FOLDER, NAMES
from support.slow import slow

SMALL = {"max_batch_tokens": 128, "kv_cache_size": 2**20}
BACKENDS = ["torch", pytest.param("jax", marks=[needs_jax, pytest.mark.slow])]


def all_zero(*endings):
    """Return a change that sets every tensor with such a name to zero."""

    def change(tensors):
        for name in [name for name in tensors if name.endswith(endings)]:
            tensors[name] = torch.zeros_like(tensors[name])

    return change


def one_value(name, index, value):
    """Return a change of one row of a tensor; the loader refuses infinities in the file itself."""

    def change(tensors):
        tensors[name][index] = value

    return change


COLLAPSED = {
    "a norm of zeros": (
        all_zero("model.norm.weight"),
        "8 different prompts get the same scores: those of 64 labels differ by at most 0.0e.00 "
        "nats, and rounding .* 6.0e-06",
    ),
    "layers of zeros": (all_zero("o_proj.weight", "down_proj.weight"), "get the same scores"),
    "an infinite label": (one_value("lm_head.weight", 399, 3e38), "8 of 8 .* are not finite"),
    "a layer that overflows": (
        one_value("model.layers.1.mlp.down_proj.weight", 0, 3e38),
        "8 of 8 .* are not finite",
    ),
}


@pytest.fixture
def backend_of(tiny_model, tmp_path):
    """Return a function that loads a tiny model, changed as a quantised one may be."""
    made = []

    def make(change=None, backend="torch", family="qwen3", **overrides):
        directory, _ = tiny_model(family, **overrides)
        if change is not None:
            shutil.copytree(directory, tmp_path / "changed")
            directory = tmp_path / "changed"
            tensors = load_file(directory / "model.safetensors")
            change(tensors)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = ModelConfig(str(directory), backend=backend, dtype="float32", **SMALL)
        made.append(create_backend(plan_backend(directory, config)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


class Quantized:
    """A real backend that says that its weights were quantised."""

    def __init__(self, backend):
        self.limits, self.layers_done = replace(backend.limits, quantized=True), 0
        self.warmup, self.close, self.collect = backend.warmup, backend.close, backend.collect
        self._extend = backend.extend

    def extend(self, batch):
        assert batch.num_tokens <= self.limits.max_tokens
        return self._extend(batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "reason"), COLLAPSED.values(), ids=COLLAPSED.keys())
def test_a_collapsed_model_is_refused(backend_of, caplog, backend, change, reason):
    made = backend_of(change, backend)
    with pytest.raises(ConfigError, match=f"has collapsed: .*{reason}.* --allow-degenerate"):
        check_collapse(made)
    check_collapse(made, allow=True)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "has collapsed" in record.message


def test_an_engine_asks_only_a_quantised_model(backend_of):
    """The plain model with the same weights is served, because its makers meant them."""
    backend = backend_of(all_zero("model.norm.weight"))
    with pytest.raises(ConfigError, match="has collapsed"):
        Engine(Quantized(backend))
    allowed = Engine(Quantized(backend), allow_degenerate=True)
    Engine(backend).close()
    allowed.close()


@pytest.mark.parametrize(("allow", "last"), [(False, Refused), (True, Ready)])
def test_the_engines_process(backend_of, allow, last):
    """The server's side is told of the refusal, and `--allow-degenerate` reaches the engine."""
    backend = Quantized(backend_of(all_zero("model.norm.weight")))
    config = ModelConfig("x", allow_degenerate=allow)
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        pipe = Pipe(ours)
        start = Start("/nowhere", Placement("cpu", config), EngineConfig())
        pipe.put(lambda: encode(start), now=True)
        code = threads.submit(child.run, theirs, lambda *_: Prepared("tiny", lambda: backend))
        messages = []
        while not any(isinstance(message, (Refused, Ready)) for message in messages):
            messages += map(decoder(FromChild), pipe.read())
        pipe.close()
        assert code.result(30) == EXIT_OK
    told = next(message for message in messages if isinstance(message, (Refused, Ready)))
    assert isinstance(told, last)
    if not allow:
        assert "has collapsed: 8 different prompts get the same scores" in told.message


HEALTHY = ["qwen3", "gemma2", "qwen3_classes", *slow(*sorted({*FAMILIES, *CLASSIFIERS}))]


@pytest.mark.parametrize("family", HEALTHY)
def test_a_healthy_model_starts_in_silence(backend_of, caplog, family):
    check_collapse(backend_of(family=family))
    assert not caplog.records


@pytest.mark.parametrize("classes", [1, 2])
def test_few_classes(backend_of, caplog, classes):
    """The probability of a single class is always 1: its logits tell prompts apart."""
    labels = {number: f"class {number}" for number in range(classes)}
    check_collapse(backend_of(family="qwen3_classes", id2label=labels))
    assert not caplog.records


@pytest.mark.parametrize("options", [{"max_model_len": 1}, {"max_batch_tokens": 3}])
def test_small_limits(tiny_model, options):
    """Prompts are shortened to what a batch holds."""
    directory, _ = tiny_model("qwen3")
    config = ModelConfig(str(directory), dtype="float32", **(SMALL | options))
    backend = create_backend(plan_backend(directory, config))
    check_collapse(Quantized(backend))
    backend.close()


@pytest.fixture
def without_scales(tmp_path):
    """A checkpoint of compressed-tensors whose scales were lost."""
    made = tmp_path / "made"
    shutil.copytree(FOLDER / "qwen3-int8", made)
    tensors = load_file(made / "model.safetensors")
    all_zero("weight_scale")(tensors)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(bos=False).save(str(made / "tokenizer.json"))
    return made


@pytest.mark.parametrize("quantization", [pytest.param("auto", marks=needs_int8), "w8a16"])
def test_a_checkpoint_without_scales(without_scales, quantization):
    options = SMALL | {"dtype": "float32", "quantization": quantization}
    with pytest.raises(ConfigError, match="8 different prompts get the same scores"):
        Scorer(str(without_scales), **options)
    with Scorer(str(without_scales), allow_degenerate=True, **options) as scorer:
        scores = scorer.score([1, 2], [[3], [4, 3]], label_token_ids=[5]).scores
    np.testing.assert_array_equal(scores[0], scores[1])


@pytest.mark.parametrize("name", ["qwen3-int8", *slow(*NAMES)])
def test_a_healthy_checkpoint_starts_in_silence(caplog, name):
    options = SMALL | {"dtype": "float32", "kv_cache_size": 2**22}
    directory = FOLDER / name
    if "moe" in name or not exact_on_this_cpu():
        options["quantization"] = "w8a16"
    backend = create_backend(plan_backend(directory, ModelConfig(str(directory), **options)))
    assert backend.limits.quantized
    Engine(backend).close()
    assert not [record for record in caplog.records if "quantised" in record.message]


def test_known_prompts_and_labels():
    limits = BackendLimits(2048, 16, 64, 512, vocab_rows=151936)
    prompts, labels = known_prompts(limits), known_labels(limits)
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    assert len({int(prompt[-1]) for prompt in prompts}) == 1
    ids = np.concatenate(prompts)
    assert ids.min() < 151936 / 10
    assert ids.max() > 151936 * 9 / 10
    assert (labels[0], labels[-1], len(set(labels))) == (0, 151935, 64)
    again = known_prompts(limits)
    assert all(np.array_equal(prompt, other) for prompt, other in zip(prompts, again, strict=True))
    classes = replace(limits, classes=("a", "b", "c"))
    assert known_labels(classes).tolist() == [0, 1, 2]
    for vocabulary in (1, 2):
        tiny = known_prompts(replace(limits, vocab_rows=vocabulary, max_model_len=1))
        assert len({prompt.tobytes() for prompt in tiny}) == len(tiny) <= vocabulary
