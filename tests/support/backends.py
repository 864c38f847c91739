"""Backends that tests share, because JAX compiles every backend anew."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.base import Backend
from gpuscore.config import ModelConfig

# With the architectures that --backend jax supports.
JAX_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")


class SharedBackends:
    """One backend for each set of options; its pages keep what earlier tests left there."""

    def __init__(self, tiny_model: Any) -> None:
        self._tiny_model, self._made = tiny_model, dict[Any, Backend]()

    def get(
        self,
        backend: str,
        family: str,
        overrides: Any = None,
        warm: bool = False,
        **options: Any,
    ) -> Backend:
        key = repr((backend, family, overrides, warm, sorted(options.items())))
        if key not in self._made:
            directory, _ = self._tiny_model(family, **(overrides or {}))
            config = ModelConfig(str(directory), backend=backend, **options)
            self._made[key] = create_backend(plan_backend(directory, config))
            if warm:
                self._made[key].warmup()
        return self._made[key]

    def close(self) -> None:
        for backend in self._made.values():
            backend.close()


def fill_pages(backend: Any, value: float) -> None:
    """Set all keys and values of every page to `value`, of rank 0 if there are several ranks."""
    backend = getattr(backend, "rank0", backend)
    if hasattr(backend, "launcher"):  # the torch backend
        for sides in backend.launcher.pool.layers:
            for side in sides:
                side.fill_(value)
        return
    import jax
    import jax.numpy as jnp

    backend.pool = jax.tree.map(lambda side: jnp.full_like(side, value), backend.pool)
