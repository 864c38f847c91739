"""Promise: the torch backend tells lack of memory and a lost device apart from other errors, and
nothing of a failed batch stays in memory."""

import gc
import logging
import traceback
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.base import DeviceLost, OutOfMemory
from gpuscore.backends.torch.work_thread import translate_errors
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import InsufficientMemory, InternalError
from gpuscore.types.request import ScoreRequest
from support.batches import in_one_batch
from support.models import random_ids

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ERRORS = [
    (torch.AcceleratorError("CUDA error: an illegal memory access"), DeviceLost),
    (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
    (RuntimeError("[enforce fail] not enough memory: you tried to allocate"), OutOfMemory),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), OutOfMemory),
    (RuntimeError("std::bad_alloc"), OutOfMemory),
    (RuntimeError("shapes do not fit"), RuntimeError),
    # Outside of torch's allocator: pinned memory, Triton, cuBLAS.
    (torch.AcceleratorError("CUDA error: out of memory\nSearch for"), OutOfMemory),
    (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c"), OutOfMemory),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access was enc"), DeviceLost),
    (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), DeviceLost),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when call"), DeviceLost),
    # A launch that is refused harms no other.
    (RuntimeError("Triton Error [CUDA]: invalid argument"), RuntimeError),
    (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling"), RuntimeError),
]


@pytest.fixture(scope="module")
def backend(tiny_model):
    directory, _ = tiny_model()
    made = create_backend(plan_backend(directory, ModelConfig(str(directory))))
    yield made
    made.close()


def test_what_this_torch_says_when_memory_is_short():
    """Check the installed release on this system: the wording differs between them."""
    with pytest.raises(OutOfMemory):
        translate_errors(lambda: torch.empty(2**45, dtype=torch.uint8), CPU)


@pytest.mark.parametrize(("raised", "expected"), ERRORS)
@pytest.mark.parametrize("late", [False, True])
def test_errors(backend, monkeypatch, raised, expected, late):
    """An error may come at the launch or only in `collect`; the next batch is unharmed."""
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


def test_products_are_summed_in_float32(tiny_model):
    """This holds even if the caller's process had allowed half-precision sums."""
    matmul, directory = torch.backends.cuda.matmul, tiny_model()[0]
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    create_backend(plan_backend(directory, ModelConfig(str(directory)))).close()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize("raised", [RuntimeError("a library's own text"), ValueError("odd")])
def test_the_device_is_asked_after_an_error_that_is_not_known(monkeypatch, raised):
    """There is no CUDA here: torch's answers are set. A lost device fails every call."""
    state = {"lost": False}

    def synchronize(device):
        if state["lost"]:
            raise torch.AcceleratorError("CUDA error: misaligned address")

    def fail():
        raise raised

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(type(raised)):
        translate_errors(fail, CUDA)
    state["lost"] = True
    with pytest.raises(DeviceLost, match=r"then reported: CUDA error: misaligned address"):
        translate_errors(fail, CUDA)


class FailingAttention:
    """An attention backend whose second layer fails, as often as `errors` has errors.

    When a batch begins, it notes which tensors of failed batches are still there.
    """

    def __init__(self, real, errors):
        self.real, self.errors = real, errors
        self.seen, self.left = [], []

    def prepare(self, batch):
        self.left.append([ref() is not None for ref in self.seen])
        real = self.real.prepare(batch)
        return type("Pass", (), {"run": staticmethod(partial(self.run, real))})

    def run(self, real, layer, q, k, v):
        out = real.run(layer, q, k, v)
        if layer == 1 and self.errors:
            self.seen += map(weakref.ref, (q, out))
            raise self.errors.pop(0)
        return out


@pytest.fixture
def failing(backend, monkeypatch):
    """Return a function that starts an engine whose batches fail with the given errors."""
    engines = []
    monkeypatch.setattr(backend, "close", lambda: None)  # other tests use it too
    gc.collect()
    gc.disable()  # nothing may depend on it: a device's memory is full long before it comes

    def start(*errors):
        attention = FailingAttention(backend.launcher.attention, list(errors))
        monkeypatch.setattr(backend.launcher, "attention", attention)
        engines.append(Engine(backend))
        return engines[-1], attention

    yield start
    gc.enable()
    for engine in engines:
        engine.close()


def request_of(rng, items):
    ids = tuple(np.array(random_ids(rng, n), np.int32) for n in items)
    labels = (np.array([3, 17], np.int32),) * len(ids)
    return ScoreRequest(np.array(random_ids(rng, 9), np.int32), ids, labels, need_lse=True)


def test_a_batch_tells_how_far_it_is(backend, failing):
    """Without it a long batch on a slow CPU would pass for one that hangs."""
    engine, _ = failing()
    before = backend.layers_done
    engine.score(request_of(np.random.default_rng(0), (3,))).result()
    layers, batches = backend.plan.architecture.config.num_layers, engine.stats().counters.batches
    assert layers > 1
    assert backend.layers_done - before == (layers - 1) * batches > 0  # the last one ends the batch


def test_nothing_of_a_failed_batch_is_left_when_the_next_one_begins(failing):
    engine, attention = failing(
        torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("some other error")
    )
    rng = np.random.default_rng(0)
    shrunk = engine.score(request_of(rng, [4, 5, 6, 7]))
    with pytest.raises(InternalError) as failure:
        shrunk.result(30)
    engine.score(request_of(rng, [3])).result(30)
    assert attention.left[:3] == [[], [False] * 2, [False] * 4]
    assert "some other error" in str(failure.value.__cause__)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), InsufficientMemory),
        (RuntimeError("some other error"), InternalError),
    ],
)
def test_an_error_that_a_caller_keeps_holds_no_batch(failing, caplog, raised, expected):
    engine, attention = failing(*(type(raised)(str(raised)) for _ in range(20)))
    future = engine.score(request_of(np.random.default_rng(0), [4]))
    with caplog.at_level(logging.ERROR), pytest.raises(expected) as failure:
        future.result(30)
    assert attention.seen
    assert not any(ref() is not None for ref in attention.seen)
    told = "".join(traceback.format_exception(failure.value.__cause__))
    assert str(raised) in told
    assert "line" not in told, "no frames, which hold the engine and its backend"
    if expected is InternalError:
        assert "in run" in caplog.text, "the log says where a batch failed"
