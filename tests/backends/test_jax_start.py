"""Promise: the JAX backend sizes its pages by what its programs take, compiles each program once,
finds it again, and says at start what a device does not give."""

import dataclasses
import json
import os
import re
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from support.backends import needs_jax
from support.model_configs import QWEN3_06B

pytestmark = needs_jax


def compiled_sizes(monkeypatch):
    """Note the programs that backends compile: their sizes and numbers of pages."""
    from gpuscore.backends.jax import backend as backend_module

    noted, compile_programs = [], backend_module.compile_programs

    def noting(sizes, model, device):
        noted.append((sizes.tokens, model.pool.pages.shape[1]))
        return compile_programs(sizes, model, device)

    monkeypatch.setattr(backend_module, "compile_programs", noting)
    return noted


def with_free_memory(monkeypatch, count):
    from gpuscore.backends.jax import plan as plan_module

    monkeypatch.setattr(plan_module, "free_memory", lambda device: count)


ONE_PROGRAM = {"backend": "jax", "dtype": "float32", "max_batch_tokens": 64}


def test_pages_take_what_the_largest_program_leaves(tiny_model, monkeypatch):
    from gpuscore.backends.jax import backend as backend_module

    directory, _ = tiny_model("qwen3")
    monkeypatch.setattr(backend_module, "kept_programs", lambda: None)  # nor their sizes
    free, noted = 2**24, compiled_sizes(monkeypatch)
    with_free_memory(monkeypatch, free)
    plan = plan_backend(directory, ModelConfig(**ONE_PROGRAM, memory_fraction=1.0))
    backend = create_backend(plan)
    assert len(noted) == 1, "the estimate was good enough: the largest program is compiled once"
    assert noted[0][1] == backend.limits.num_pages
    pool = backend.pool.pages.nbytes
    (programs,) = backend.programs.values()
    assert programs.bytes > 2 * 64 * 48 * 4, "at least hidden states in and out of a layer"
    fits = (free - programs.bytes) // plan.pages.page_bytes * plan.pages.page_bytes
    assert 0.85 * fits < pool <= fits
    backend.close()
    with_free_memory(monkeypatch, plan.pages.needed * plan.pages.page_bytes + programs.bytes // 2)
    monkeypatch.setattr(backend_module, "compile_programs", lambda *args: programs)
    with pytest.raises(ConfigError, match="are available .*the largest batch takes"):
        create_backend(plan)


def test_the_cache_of_programs(tiny_model, tmp_path, monkeypatch):
    """The second start finds every program, although a little less memory is free."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    directory, _ = tiny_model("qwen3", num_hidden_layers=1)
    events, noted = [], compiled_sizes(monkeypatch)
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
    config = ModelConfig(**ONE_PROGRAM | {"max_batch_tokens": 33})
    kept, starts = jax.config.jax_compilation_cache_dir, []
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))  # as its variable does
    try:
        for free in (2**24, 2**24 - 2**15):
            events.clear(), noted.clear()
            with_free_memory(monkeypatch, free)
            backend = create_backend(plan_backend(directory, config))
            backend.warmup()
            starts.append((len(noted), events.count("cache_misses"), backend.limits.num_pages))
            backend.close()
        assert any(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
        compilation_cache.reset_cache()
    (_, missed, pages), second = starts
    assert missed >= 2
    assert second == (1, 0, pages)


def test_memory_that_xla_refuses_is_a_configuration_error(tiny_model, monkeypatch):
    """A device may report more free memory than it gives."""
    directory, _ = tiny_model("qwen3")
    with_free_memory(monkeypatch, 2**60)
    plan = plan_backend(directory, ModelConfig(**ONE_PROGRAM, kv_cache_size=2**43))
    with pytest.raises(ConfigError, match=r"JAX cannot make .* pages of .* MiB.*--kv-cache-size"):
        create_backend(plan)


def on_a_tpu(monkeypatch):
    from gpuscore.backends.jax import plan as plan_module

    monkeypatch.setattr(plan_module, "kind_of", lambda device: "tpu")


def test_plans_for_a_tpu(tiny_model, monkeypatch):
    """Pallas is the default; a page's bytes include the padding of heads; float16 is refused."""
    directory, _ = tiny_model("qwen3")
    on_a_tpu(monkeypatch)
    config = ModelConfig(backend="jax", dtype="bfloat16")
    plan = plan_backend(directory, config)
    assert plan.attention == "pallas"
    assert plan_backend(directory, dataclasses.replace(config, attention="xla")).attention == "xla"
    model = plan.architecture.config
    assert model.num_kv_heads * model.head_dim < 128, "one tile holds the heads of the tiny model"
    assert plan.pages.page_bytes == plan.pages.size * 2 * model.num_layers * 128 * 2
    largest = plan.sizes()[-1].tiling
    assert (largest.rows, largest.batch_keys, largest.product_rows[0]) == (256, 256, 2048)
    with pytest.raises(ConfigError, match="float16, which a TPU multiplies as bfloat16"):
        plan_backend(directory, dataclasses.replace(config, dtype="float16"))


@pytest.mark.parametrize("tokens", [64, 16384, 65536])
def test_numbers_of_the_kernel_fit_scalar_memory(tiny_model, monkeypatch, tokens):
    """A TPU v6e has 1 MiB of scalar memory."""
    from gpuscore.backends.jax.layout import buffer_length, divided

    directory, _ = tiny_model("qwen3")
    on_a_tpu(monkeypatch)
    config = ModelConfig(backend="jax", dtype="bfloat16", max_batch_tokens=tokens)
    sizes = plan_backend(directory, config).sizes()[-1]
    tables = divided(np.zeros(buffer_length(sizes), np.int32), sizes)
    numbers = (*tables.all_rows.bounds, tables.all_rows.blocks, tables.pages)
    numbers += (tables.prefix_lens, tables.block_starts)
    assert sizes.tokens == tokens
    assert sum(table.nbytes for table in numbers) < 2**20 * 3 // 4


WIDE = 8209  # tokens; a prime number, so that no other size is a multiple of it


PAGES = 8219  # of a pool; another prime number


def test_no_program_holds_logits_of_all_tokens_or_a_second_pool(monkeypatch):
    """Show that beside embedding and head no array is as wide as the vocabulary, that the only one
    of so many pages is the pool, and that its memory is given back."""
    programs, head = traced(WIDE, monkeypatch, PAGES)
    for platform in ("cuda", "tpu"):
        extend, labels = (
            program.lower(lowering_platforms=(platform,)).as_text()
            for program in (programs.extend, programs.labels)
        )
        for text in (extend, labels):
            wide = set(re.findall(rf"tensor<(?:\d+x)*{WIDE}x[^>]*>", text))
            assert wide == {f"tensor<{WIDE}x{head.shape[1]}xbf16>"}
        (pool,) = set(re.findall(rf"tensor<(?:\d+x)*{PAGES}x[^>]*>", extend))
        assert len(re.findall(rf"{re.escape(pool)} {{[^%]*tf.aliasing_output", extend)) == 1


def test_memory_of_a_program_does_not_grow_with_vocabulary_or_pool(monkeypatch):
    """XLA tells the memory for this CPU, in float32: bfloat16 it reads from a copy as integers."""
    from gpuscore.backends.jax.programs import XLA_OPTIONS

    temporary_bytes, options = [], XLA_OPTIONS
    for sizes in ((WIDE, 16), (4 * WIDE, PAGES)):
        programs, _ = traced(sizes[0], monkeypatch, sizes[1], "float32")
        taken = [
            program.lower().compile(options).memory_analysis().temp_size_in_bytes
            for program in (programs.extend, programs.labels)
        ]
        temporary_bytes.append(taken)
    assert temporary_bytes[0] == temporary_bytes[1]


def traced(vocab, monkeypatch, pages=16, dtype="bfloat16"):
    """Return traced programs of a small model with tiles as on CUDA, and its head's shape."""
    from gpuscore.backends.jax import plan as planning
    from gpuscore.backends.jax.backend import attends_of, pool_shapes
    from gpuscore.backends.jax.programs import ProgramModel, trace_programs
    from gpuscore.backends.jax.weights import weight_shapes_of

    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = QWEN3_06B | small | heads | {"vocab_size": vocab}
    with_free_memory(monkeypatch, 2**32)
    settings = {"backend": "jax", "dtype": dtype, "max_batch_tokens": 1024}
    settings |= {"kv_cache_size": 2**20, "device": "cpu", "max_model_len": 1024}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        plan = plan_backend(Path(folder), ModelConfig(**settings))
    monkeypatch.setattr(planning, "kind_of", lambda device: "cuda")
    weights = weight_shapes_of(plan.architecture, plan.dtype_name, plan.precision)
    pool, attends = pool_shapes(plan, pages), attends_of(plan.attention)
    model = ProgramModel(plan.architecture.config, weights, pool, attends, plan.heads)
    programs = trace_programs(plan.sizes()[-1], model, plan.device)
    monkeypatch.undo()
    return programs, weights.lm_head


@pytest.mark.parametrize(
    ("environment", "used", "fraction"),
    [
        ({}, False, None),
        ({}, True, "0.450"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}, True, None),
        ({"XLA_CLIENT_MEM_FRACTION": ".3"}, True, ".3"),
    ],
)
def test_torch_keeps_its_memory(monkeypatch, environment, used, fraction):
    import torch

    from gpuscore.backends.jax import platform

    for name in (platform.FRACTION, platform.OLD_FRACTION):
        monkeypatch.setenv(name, "")  # so that monkeypatch puts it back
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * 2**30, 80 * 2**30))
    monkeypatch.setenv(platform.PREALLOCATE, "")
    monkeypatch.delenv(platform.PREALLOCATE)
    platform.find_device("cpu")
    assert os.environ.get(platform.FRACTION) == fraction
    assert platform.PREALLOCATE not in os.environ


@pytest.mark.parametrize(
    ("region", "preallocate", "free"), [(0, None, 90), (50, None, 40), (50, "false", 90)]
)
def test_free_memory_of_a_gpu(monkeypatch, region, preallocate, free):
    """Other processes may leave JAX less than its limit."""
    from gpuscore.backends.jax import platform

    class Gpu:
        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": 10, "pool_bytes": region}

    monkeypatch.delenv(platform.PREALLOCATE, raising=False)
    if preallocate is not None:
        monkeypatch.setenv(platform.PREALLOCATE, preallocate)
    assert platform.free_memory(Gpu()) == free


def test_the_reference_of_the_check_at_start_multiplies_in_full_precision(tiny_model):
    """Read the program: by default float32 is TF32 on CUDA, and bfloat16 on a TPU."""
    import jax

    from gpuscore.backends.jax.start_check import reference_hidden
    from gpuscore.backends.jax.weights import weight_shapes_of
    from gpuscore.types.batch import Segment, pack, visible_rows

    directory, _ = tiny_model("qwen3")
    plan = plan_backend(directory, ModelConfig(**ONE_PROGRAM))
    batch = pack([Segment(np.arange(5, dtype=np.int32), 0, 0)], [])
    weights = weight_shapes_of(plan.architecture, "float32", plan.precision)
    rows = jax.ShapeDtypeStruct((batch.num_tokens, *weights.embed_tokens.shape[1:]), "float32")
    weights = weights._replace(embed_tokens=rows)
    arguments = weights, batch.positions, visible_rows(batch)
    config = plan.architecture.config
    program = str(jax.make_jaxpr(partial(reference_hidden, config))(*arguments))
    assert program.count("dot_general[") > 5
    assert program.count("precision=") == program.count("dot_general[")
    assert "precision=None" not in program
