"""Promise: a key or value that is not finite does not reach rows of other requests, nor pages that
they may find; a row that sees it is not finite."""

import numpy as np
import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.torch.attention.choice import attention_factory
from gpuscore.backends.torch.decoder import Decoder, ForwardContext
from gpuscore.backends.torch.kv_pool import KeptRows, KVPool, index_of
from gpuscore.backends.torch.loader import WeightFormat, load_weights
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.engine.runner import Runner
from gpuscore.errors import NonfiniteScore
from gpuscore.types.request import ScoreRequest
from gpuscore_kernels.extend_attention.reference import extend_attention
from support.backends import needs_jax
from support.batches import int32
from support.poison import POISON, batches, check_neighbours, poisoned
from support.slow import slow
from support.stepped_runner import run, submit
from support.token_ids import random_ids

JAX = {"backend": "jax"}
SAME_BITS = {"deterministic": True, "max_batch_tokens": 128}


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("qwen3", "kv", {}),
        ("gemma3", "v", {}),  # windows
        ("qwen3", "v", {"compile": "on"}),
        pytest.param("qwen3", "v", JAX, marks=needs_jax),
        *slow(
            ("qwen3", "k", {}),
            ("gemma2", "v", {}),  # a soft-cap
            ("gemma3", "kv", {"compile": "on"}),
            ("qwen3", "v", {"compile": "on", "dtype": "bfloat16"}),
            ("gemma2", "kv", SAME_BITS),
            ("gemma2", "kv", SAME_BITS | {"compile": "on"}),
            ("gemma3", "k", SAME_BITS),
            ("qwen3_moe", "kv", {}),
        ),
        pytest.param("qwen3", "k", JAX, marks=[needs_jax, pytest.mark.slow]),
    ],
)
def test_neighbours_of_a_poisoned_request(family, kind, options, tiny_model, tmp_path):
    directory = poisoned(tiny_model(family)[0], tmp_path / "model", kind)
    how = {"device": "cpu", "dtype": "float32", "max_batch_tokens": 64, "kv_cache_size": 2**23}
    check_neighbours(ModelConfig(str(directory), **how | options))


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=needs_jax)])
def test_only_the_poisoned_request_fails(backend, tiny_model, tmp_path):
    """This holds, too, for requests that begin alike and come one after the other."""
    directory = poisoned(tiny_model("qwen3")[0], tmp_path / "model", "v")
    how = {"dtype": "float32", "device": "cpu", "max_batch_tokens": 64}
    config = ModelConfig(str(directory), backend=backend, **how)
    made = create_backend(plan_backend(directory, config))
    try:
        runner, page, rng = Runner(made), made.limits.page_size, np.random.default_rng(0)
        start = random_ids(rng, page)
        rests = [[POISON, *random_ids(rng, 3)], random_ids(rng, 4), random_ids(rng, 9)]
        items, labels = (int32(random_ids(rng, 5)),), (int32([3, 17]),)
        asked = [ScoreRequest(int32(start + rest), items, labels, True) for rest in rests]
        tickets = [submit(runner, request) for request in asked]
        run(runner)
        tickets.append(submit(runner, asked[1]))
        run(runner)
        assert runner.counters().cached_tokens >= page
        assert isinstance(tickets[0].future.exception(), NonfiniteScore)
        for ticket in tickets[1:]:
            assert np.isfinite(ticket.future.result().label_logits[0]).all()
        assert runner.counters().nonfinite_rows == 2, "the poisoned item, and once more alone"
    finally:
        made.close()


@pytest.mark.parametrize("max_tokens", [8, 512])  # the query in chunks, or at once
def test_pages_that_are_not_finite_are_not_found_again(max_tokens, tiny_model):
    """Memory that went bad costs the request that read it its answer, and no later one."""
    directory, _ = tiny_model("qwen3")
    config = ModelConfig(str(directory), dtype="float32", device="cpu", max_batch_tokens=max_tokens)
    made = create_backend(plan_backend(directory, config))
    engine, rng = Engine(made), np.random.default_rng(0)
    try:
        query, item = (int32(random_ids(rng, n)) for n in (3 * made.limits.page_size, 4))
        request = ScoreRequest(query, (item,), (int32([3, 17]),), need_lse=True)
        expected = engine.score(request).result()
        for side in (side for layer in made.launcher.pool.layers for side in layer):
            side.masked_fill_(side != 0, torch.nan)  # never written memory is zeros
        with pytest.raises(NonfiniteScore):
            engine.score(request).result()
        again = engine.score(request).result()
        np.testing.assert_array_equal(again.label_logits[0], expected.label_logits[0])
        assert engine.stats().counters.cached_tokens == 3 * made.limits.page_size, "once"
        assert engine.stats().pages_used == 0
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", *slow("gemma3")])
def test_a_device_is_not_waited_for(family, tiny_model):
    """With `--attention torch` on a device: meta tensors refuse whatever brings a number to the
    host."""
    meta = torch.device("meta")
    directory, _ = tiny_model(family)
    plan = plan_backend(directory, ModelConfig(str(directory), device="cpu", dtype="float32"))
    config, dtype = plan.architecture.config, torch.float32
    weights = load_weights(directory, plan.architecture, WeightFormat(dtype, meta))
    decoder, pool = Decoder(config, weights), KVPool(config, 32, 16, dtype, meta)
    attention = attention_factory("torch", extend_attention, False)(config, pool)
    batch, _ = batches(POISON, 16)
    attended, kept = attention.prepare(batch), KeptRows.of(batch.slot_mapping, pool)
    tokens, positions, rows = (
        index_of(values, meta) for values in (batch.token_ids, batch.positions, batch.score_rows)
    )
    hidden = decoder(tokens, positions, rows, ForwardContext(attended, kept))
    assert hidden.shape == (len(rows), config.hidden_size)
    with pytest.raises(RuntimeError, match="meta"):
        bool(hidden.sum().isfinite())
