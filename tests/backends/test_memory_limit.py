"""Promise: --memory-limit bounds weights, the largest batch and pages together."""

import pytest

from backends.test_memory import MIB, PAGE, SetMemory, backend_of
from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

__all__ = ["backend_of"]  # a fixture


def test_a_limit_holds_for_weights_batch_and_pages_together(backend_of, tiny_model):
    directory, _ = tiny_model()
    weights = plan_backend(directory, ModelConfig(dtype="float32")).weight_bytes
    limit = weights + 5 * MIB + 100 * PAGE
    assert backend_of(SetMemory(2**40, 5 * MIB), memory_limit=limit).limits.num_pages == 70
    less = SetMemory(5 * MIB + 90 * PAGE, 5 * MIB)
    assert backend_of(less, memory_limit=limit).limits.num_pages == 63
    unknown = SetMemory(2**40, None)  # half of what the limit leaves is kept for a batch
    pages = backend_of(unknown, memory_limit=weights + 200 * PAGE).limits.num_pages
    assert pages == 70
    with pytest.raises(ConfigError, match=r"weights leave 5.6 MiB of --memory-limit, the largest"):
        backend_of(SetMemory(2**40, 5 * MIB), memory_limit=limit - 53 * PAGE)
    with pytest.raises(ConfigError, match=r"take 0.4 MiB, over the --memory-limit of 0.4 MiB"):
        backend_of(SetMemory(2**40, 5 * MIB), memory_limit=weights - 1)
