"""Promise: with `--attention triton` too, a key or value that is not finite reaches no other
request."""

import pytest

from support.kernels import in_triton
from support.poison import check_neighbours, poisoned
from support.slow import slow

SAME_BITS = {"deterministic": True}
OTHERS = {"kernels": "torch"}  # torch's operators store keys and values


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("qwen3", "v", {}),
        ("qwen3", "kv", OTHERS),
        *slow(
            ("qwen3", "k", OTHERS),
            ("qwen3", "kv", {}),
            ("qwen3", "k", {}),
            ("gemma3", "v", {}),
            ("qwen3_moe", "kv", {}),
            ("qwen3", "v", SAME_BITS),
        ),
    ],
)
def test_neighbours_of_a_poisoned_request(family, kind, options, tiny_model, tmp_path, quick_start):
    layers = {} if family == "gemma3" else {"num_hidden_layers": 2}
    directory = poisoned(tiny_model(family, **layers)[0], tmp_path / "model", kind)
    check_neighbours(in_triton(directory, max_batch_tokens=256, max_model_len=128, **options))
