"""Promise: the torch backend tells lack of memory and a lost device apart from other errors of
torch."""

import numpy as np
import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.base import DeviceLost, OutOfMemory
from gpuscore.backends.torch.backend import _translated
from gpuscore.config import ModelConfig
from support.batches import in_one_batch
from support.models import random_ids


def test_what_this_torch_says_when_memory_is_short():
    """Check the installed release on this system: the wording differs between them."""
    with pytest.raises(OutOfMemory):
        _translated(lambda: torch.empty(2**45, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access"), DeviceLost),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (RuntimeError("[enforce fail] not enough memory: you tried to allocate"), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), OutOfMemory),
        (RuntimeError("std::bad_alloc"), OutOfMemory),
        (RuntimeError("shapes do not fit"), RuntimeError),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_errors(tiny_model, monkeypatch, raised, expected, late):
    """An error at the launch and one that shows only in `collect`; the next batch is unharmed."""
    directory, _ = tiny_model()
    backend = create_backend(plan_backend(directory, ModelConfig(str(directory))))
    rng = np.random.default_rng(0)
    batch = in_one_batch(random_ids(rng, 9), [random_ids(rng, 4)], [3, 17])
    before = backend.collect(backend.extend(batch))

    def fail(*_):
        raise raised

    with monkeypatch.context() as patch:
        patch.setattr(backend.launcher, "launch", (lambda batch: fail) if late else fail)
        with pytest.raises(expected) as failure:
            backend.collect(backend.extend(batch))
    assert type(failure.value) is expected
    again = backend.collect(backend.extend(batch))
    np.testing.assert_array_equal(again.label_logits, before.label_logits)
    backend.close()
