"""Promise: the JAX backend scores as transformers, refuses options it does not support, compiles
only at warm-up and never copies its pool."""

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.backends.base import DeviceLost
from gpuscore.config import ModelConfig
from gpuscore.config.options import checked
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError, Unavailable
from gpuscore.types.batch import Prefix, pack
from gpuscore.types.request import ScoreRequest
from support.backends import needs_jax
from support.batches import Pages, in_one_batch, item_segments, query_chunks
from support.models import random_ids, reference_logprobs
from support.slow import slow

pytestmark = needs_jax

TOLERANCE = 1e-4
LABELS = [3, 17, 399]
# Two programs, and the backend of test_contract.py: no others are compiled.
SMALL = {"dtype": "float32", "max_batch_tokens": 512}
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def small(shared_backends):
    """A backend shared by the tests that any backend would do for; none of them closes it."""
    backend = shared_backends.get("jax", "qwen3", **SMALL)
    backend.warmup()
    return backend


def run(backend, batch):
    return backend.collect(backend.extend(batch))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_hidden_layers": 1}),  # with Llama 3's rotary scaling
        *slow(("llama", {}), ("mistral", {"sliding_window": 33})),
        *slow(("qwen2", {"num_hidden_layers": 1})),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}),
    ],
)
def test_as_transformers(tiny_model, rng, family, overrides):
    """The query and some items are longer than a batch, so prefixes and chunks occur."""
    directory, model = tiny_model(family, **overrides)
    query = random_ids(rng, 90)
    items = [random_ids(rng, n) for n in (1, 2, 5, 20, 20, 41, 111, 3)]
    with Scorer(str(directory), backend="jax", dtype="float32", max_batch_tokens=64) as scorer:
        options = {"label_token_ids": LABELS, "logprobs": True}
        for item_first in (False, True):
            result = scorer.score(query, items, item_first=item_first, **options)
            prompts = [i + query if item_first else query + i for i in items]
            expected = reference_logprobs(model, prompts)[:, LABELS]
            assert expected.std() > 1
            np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("count", [6, *slow(16)])
def test_nothing_is_compiled_after_warmup(small, tiny_model, count):
    """Random requests are in flight together, and their scores are right as well."""
    import jax

    rng = np.random.default_rng(5)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name == COMPILED else None
    )
    jax.jit(lambda x: x + 1)(np.float32(rng.random()))
    assert compiled, "the listener does not see compilations"
    compiled.clear()
    engine = Engine(small)
    requests, prompts = [], []
    for _ in range(count):
        query = random_ids(rng, int(rng.choice([0, 1, 15, 60, 130, 300])))
        size, longest = int(rng.integers(1, 40)), int(rng.choice([2, 9, 150]))
        items = [random_ids(rng, int(n)) for n in rng.integers(1, longest, size)]
        num_top, labels = int(rng.choice([0, 1, 4])), random_ids(rng, int(rng.choice([1, 3, 90])))
        requests.append(
            ScoreRequest(
                np.array(query, np.int32),
                tuple(np.array(item, np.int32) for item in items),
                (np.array(labels, np.int32),) * size,
                need_lse=bool(rng.integers(2)),
                num_top=num_top,
            )
        )
        prompts.append([query + item for item in items])
    results = [future.result(60) for future in map(engine.score, requests)]
    assert not compiled
    for request, result, some in zip(requests[:6], results, prompts, strict=False):
        expected = reference_logprobs(tiny_model("qwen3")[1], some)
        labels = request.label_ids[0]
        got = np.stack(result.label_logits).astype(float)
        got -= result.lse[:, None] if request.need_lse else got[:, :1] - expected[:, labels[:1]]
        np.testing.assert_allclose(got, expected[:, labels], atol=TOLERANCE, rtol=0)
        if request.num_top:
            order = np.argsort(-expected, axis=1, kind="stable")[:, : request.num_top]
            np.testing.assert_array_equal(result.top_ids, order)


def test_the_pool_is_never_copied(small, rng):
    import jax

    def pointers():
        return [side.unsafe_buffer_pointer() for side in jax.tree.leaves(small.pool)]

    before = pointers()
    for _ in range(3):
        run(small, in_one_batch(random_ids(rng, 50), [random_ids(rng, 9)], LABELS))
    assert pointers() == before


def test_extend_does_not_wait(small, rng):
    batch = in_one_batch(random_ids(rng, 9), [random_ids(rng, 28)] * 4, LABELS)
    run(small, batch)
    pending = [small.extend(batch) for _ in range(20)]
    assert not pending[-1][0].rows.lse.is_ready()
    scores = [small.collect(handle).label_logits for handle in pending]
    assert all(np.array_equal(scores[0], other) for other in scores)


@pytest.mark.parametrize(
    "family", ["gemma", "gemma2", "gemma3", "gemma2_classes", "qwen3_moe", "qwen3_5"]
)
def test_other_architectures_are_refused(tiny_model, family):
    directory, _ = tiny_model(family)
    with pytest.raises(ConfigError, match=r"which --backend jax does not compute.*--backend torch"):
        plan_backend(directory, ModelConfig(backend="jax"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "triton"}, "--attention triton needs --backend torch"),
        ({"attention": "pallas", "device": "cpu"}, "--attention pallas: device is cpu; .*: tpu"),
        ({"kernels": "triton"}, "--kernels triton needs --backend torch"),
        ({"kernels": "torch"}, "--kernels torch needs --backend torch"),
        ({"compile": "off"}, "--compile off needs --backend torch"),
        ({"deterministic": True}, "--deterministic needs calls of fixed shapes"),
        ({"threads": 3}, "--threads 3 needs --backend torch"),
        ({"cuda_graph_tokens": 64}, "--cuda-graph-tokens 64 needs --backend torch"),
        ({"device": "tpu"}, "--device tpu: this JAX sees no such device; supported here: cpu"),
        ({"kv_cache_size": "200KiB"}, "512 needs 528 tokens of KV cache"),
        ({"backend": "torch", "attention": "pallas"}, "--attention pallas needs --backend jax"),
        ({"backend": "torch", "attention": "xla"}, "--attention xla needs --backend jax"),
        ({"backend": "torch", "device": "tpu"}, "--device tpu needs --backend jax"),
    ],
)
def test_options_that_do_not_fit(tiny_model, options, message):
    directory, _ = tiny_model("qwen3")
    with pytest.raises(ConfigError, match=message):
        plan_backend(directory, checked(ModelConfig(**({"backend": "jax"} | options))))


@pytest.mark.parametrize(
    "options",
    [{"compile": "on"}, {"cuda_graph_tokens": 0}, {"device": "cpu"}, {"attention": "xla"}],
)
def test_options_that_change_nothing(tiny_model, options):
    directory, _ = tiny_model("qwen3")
    plan = plan_backend(directory, ModelConfig(backend="jax", **options))
    assert (plan.attention, plan.device_name, plan.dtype_name) == ("xla", "cpu", "float32")


def test_programs_scatter_nothing(small):
    """Pages and states are written by slices, and rows of the last layer are read once."""
    for programs in small.programs.values():
        text = programs.extend.as_text()
        assert "dynamic-update-slice" in text
        assert " scatter(" not in text


def test_batches_with_many_pages_are_divided(small, rng, monkeypatch):
    """Each part holds whole trees; together they give what one undivided batch gives."""
    from gpuscore.backends.jax import backend as backend_module

    size, segments, prefixes = small.limits.page_size, [], []
    pages = Pages.shuffled(rng, 24, size)
    for request, length in enumerate((40, 17, 64)):
        own = pages.of(request, length)
        for chunk in query_chunks(random_ids(rng, length), [length], own, size):
            run(small, chunk)
        prefixes.append(Prefix(length, own))
        items = [random_ids(rng, n) for n in (3, 11)]
        segments += item_segments(items, length, request, -1, LABELS, need_lse=request == 1)
    batch = pack(segments, prefixes, num_top=2)
    whole = run(small, batch)
    split, parts = backend_module.split, []

    def narrow(batch, entries, room):
        parts.extend(split(batch, entries, int(entries.max())))
        return parts

    monkeypatch.setattr(backend_module, "split", narrow)
    divided = run(small, batch)
    assert len(parts) == 3
    np.testing.assert_allclose(divided.label_logits, whole.label_logits, atol=1e-5)
    np.testing.assert_allclose(divided.lse, whole.lse, atol=1e-5)
    np.testing.assert_array_equal(divided.top_ids, whole.top_ids)
    np.testing.assert_allclose(divided.top_logits, whole.top_logits, atol=1e-5)


def test_a_lost_pool_ends_the_engine(small, rng):
    """A batch that fails may lose the pool, and with it the pages that other requests need."""
    import jax
    from jax import numpy as jnp

    engine, spare = Engine(small), jax.tree.map(jnp.copy, small.pool)
    small.pool.pages.delete()
    with pytest.raises(DeviceLost, match="KV cache was lost"):
        small.extend(in_one_batch(random_ids(rng, 9), [random_ids(rng, 4)], LABELS))
    ids = np.array([1, 2, 3], np.int32)
    with pytest.raises(Unavailable):
        engine.score(ScoreRequest(ids, (ids,), (ids,), need_lse=True)).result(30)
    assert not engine.alive
    small.pool = spare
