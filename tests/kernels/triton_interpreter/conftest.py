"""Kernels run in Triton's interpreter, or on a GPU; which one is known when they are imported.

So a plain pytest without a GPU collects nothing here: `tests/kernels/test_interpreted.py` starts
one with TRITON_INTERPRET=1. On a GPU the same tests run as they are (`make test-gpu`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuscore.backends.torch import backend, known_answer
from support.kernels import INTERPRETED

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


# What NumPy says where a GPU is silent: the interpreter's loop bounds, exp(large), NaN.
SILENT = (
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in SILENT:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the batches of a backend's start, which take the interpreter half a minute, and with
    known answers of a few rows. On a GPU a start is a whole one."""
    if INTERPRETED:
        monkeypatch.setattr(backend, "warmup_batches", lambda *a: iter(()))
        monkeypatch.setattr(backend, "largest_batches", lambda *a: iter(()))
        monkeypatch.setattr(known_answer, "ROWS", 5)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN, or an id that no test expects."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            x = make(*arguments, **options)
            return x.fill_(torch.nan if x.is_floating_point() else -99)

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
