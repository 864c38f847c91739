"""Promise: a start measures memory with few rows behind the longest prefix."""

import pytest

from gpuscore.backends import plan_backend
from gpuscore.backends.common.batches import largest_in_parts
from gpuscore.backends.torch import backend
from gpuscore.config import ModelConfig
from support.slow import slow


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", "bfloat16"), *slow(("gemma2", "float32"))],
)
def test_rows_behind_the_longest_prefix(family, dtype, tiny_model, monkeypatch):
    parts = []

    def made(*sizes):
        parts.extend(map(list, largest_in_parts(*sizes)))
        return []

    monkeypatch.setattr(backend, "largest_in_parts", made)
    directory, _ = tiny_model(family, max_position_embeddings=4096)
    config = ModelConfig(
        str(directory), dtype=dtype, device="cpu", max_batch_tokens=300, kv_cache_size=2**24
    )
    plan = plan_backend(directory, config)
    backend.TorchBackend(plan).close()
    full, few = parts
    assert {batch.num_tokens for batch in full} == {300}
    assert [batch.num_tokens for batch in few] == [256]
    assert few[0].prefix_lens[0] == 4095
