"""Promise: with `--attention triton` too, a key or value that is not finite reaches no other
request."""

import pytest

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from support.kernels import DEVICE
from support.poison import check_neighbours, poisoned
from support.slow import slow

SAME_BITS = {"deterministic": True}


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("qwen3", "v", {}),
        *slow(
            ("qwen3", "kv", {}),
            ("qwen3", "k", {}),
            ("gemma3", "v", {}),
            ("qwen3_moe", "kv", {}),
            ("qwen3", "v", SAME_BITS),
        ),
    ],
)
def test_neighbours_of_a_poisoned_request(family, kind, options, tiny_model, tmp_path, quick_start):
    directory = poisoned(tiny_model(family)[0], tmp_path / "model", kind)
    config = ModelConfig(
        str(directory),
        device=DEVICE,
        dtype="float32",
        attention="triton",
        kernels="triton",
        max_batch_tokens=256,
        max_model_len=128,
        kv_cache_size=2**22,
        **options,
    )
    made = create_backend(plan_backend(directory, config))
    try:
        check_neighbours(made, exact=options == SAME_BITS)
    finally:
        made.close()
