import os

# Set before anything imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:  # they take seconds, and the process that hands out the tests needs neither
    from transformers import PreTrainedModel

for name in [name for name in os.environ if name.startswith("GPUSCORE_")]:
    del os.environ[name]  # what a developer has set must not change a test

ModelFactory: TypeAlias = "Callable[..., tuple[Path, PreTrainedModel]]"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models: a second thread only waits."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """A factory: tiny_model("llama", **config) -> (directory, transformers model), cached."""
    from support.models import make_model

    made: dict[Any, tuple[Path, PreTrainedModel]] = {}

    def make(family: str = "qwen3", **overrides: Any) -> "tuple[Path, PreTrainedModel]":
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = directory, make_model(directory, family, **overrides)
        return made[key]

    return make
