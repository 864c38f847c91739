"""Promise: a start measures memory with few rows behind the longest prefix, and with even fewer
where attention takes no memory for each pair of a row and a key."""

import pytest

from gpuscore.backends import plan_backend
from gpuscore.backends.common.batches import largest_in_parts
from gpuscore.backends.torch import backend
from gpuscore.config import ModelConfig
from support.slow import slow

NO_WINDOWS = {"layer_types": ["full_attention"] * 3}


@pytest.mark.parametrize(
    ("family", "dtype", "overrides", "tokens"),
    [
        ("qwen3", "float32", {}, [64]),
        ("gemma2", "float32", NO_WINDOWS, [256, 256]),  # a soft-cap
        *slow(("qwen3", "bfloat16", {}, [256]), ("gemma3", "float32", {}, [256, 256])),
    ],
)
def test_rows_behind_the_longest_prefix(family, dtype, overrides, tokens, tiny_model, monkeypatch):
    parts = []

    def made(*sizes, **how):
        parts.extend(map(list, largest_in_parts(*sizes, **how)))
        return []

    monkeypatch.setattr(backend, "largest_in_parts", made)
    directory, _ = tiny_model(family, max_position_embeddings=4096, **overrides)
    config = ModelConfig(
        str(directory), dtype=dtype, device="cpu", max_batch_tokens=300, kv_cache_size=2**24
    )
    plan = plan_backend(directory, config)
    if overrides:
        assert set(plan.architecture.config.windows) == {None}
    backend.TorchBackend(plan).close()
    full, few = parts
    assert {batch.num_tokens for batch in full} == {300}
    assert [batch.num_tokens for batch in few] == tokens
    assert few[0].prefix_lens[0] == 4095
