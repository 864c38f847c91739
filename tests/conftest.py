import os

# Set before anything imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# XLA optimises a program for two seconds and compiles it in one; tests run it a few times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from support.backends import SharedBackends
from support.models import make_model

for name in [name for name in os.environ if name.startswith("GPUSCORE_")]:
    del os.environ[name]  # what a developer has set must not change a test
transformers_logging.disable_progress_bar()
torch.set_num_threads(1)  # tiny models: a second thread only waits

ModelFactory = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """A factory: tiny_model("llama", **config) -> (directory, transformers model), cached."""
    made: dict[Any, tuple[Path, PreTrainedModel]] = {}

    def make(family: str = "qwen3", **overrides: Any) -> tuple[Path, PreTrainedModel]:
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = directory, make_model(directory, family, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def shared_backends(tiny_model: ModelFactory) -> Iterator[SharedBackends]:
    """Backends over tiny models that are loaded once: get("jax", "qwen3", dtype="float32")."""
    backends = SharedBackends(tiny_model)
    yield backends
    backends.close()
