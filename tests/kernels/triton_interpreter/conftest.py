"""Kernels run in Triton's interpreter or on a GPU; that is decided when they are imported.

A plain pytest without a GPU therefore collects nothing here: `tests/kernels/test_interpreted.py`
starts one with TRITON_INTERPRET=1. On a GPU the same tests run directly (`make test-gpu`).
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuscore.backends.torch import backend
from gpuscore.backends.torch.attention import choice, fa4
from support.fa4_stand_in import kernel
from support.kept import model_directory
from support.kernels import INTERPRETED
from support.quick_interpreter import shorten, steady_products

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=INTERPRETED)
def _quicker_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        steady_products(patch)
        yield


# NumPy warns of these where a GPU is silent: the interpreter's loop bounds, exp(large), NaN.
SILENT = (
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            for warning in SILENT:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., tuple[Path, None]]:
    """The factory of `tests/conftest.py` without the model, because transformers takes seconds to
    import."""
    return lambda family, **overrides: (model_directory(family, overrides), None)


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten a backend's start in the interpreter: skip its batches and its check, which take half
    a minute. On a GPU the start is complete."""
    if INTERPRETED:
        monkeypatch.setattr(backend, "warmup_batches", lambda *a: iter(()))
        monkeypatch.setattr(backend, "largest_batches", lambda *a: iter(()))
        monkeypatch.setattr(backend, "largest_in_parts", lambda *a: iter(()))
        monkeypatch.setattr(backend, "check_start", lambda *_: None)


@pytest.fixture
def fa4_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `--attention fa4` run on a CPU, with a kernel that stands in for the compiled one."""
    monkeypatch.setattr(fa4, "load", lambda *sizes: kernel)
    monkeypatch.setattr(fa4, "MOST_BLOCKS", 1)  # the interpreter takes long for empty programs
    reasons = choice.REASONS | {"fa4": choice.REASONS["triton"]}
    monkeypatch.setattr(choice, "REASONS", reasons)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, or with an id that no test expects, to show what a kernel leaves
    unwritten."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            x = make(*arguments, **options)
            return x.fill_(torch.nan if x.is_floating_point() else -99)

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
