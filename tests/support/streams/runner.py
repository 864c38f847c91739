"""The product's torch backend on the recorder's device, with the queue of its free buffers watched.

Nothing of the product is replaced but what a CUDA device would do: `torch.cuda`, Triton's launch,
and the backend's thread, which runs by turns with the engine's. The check at start is left
out, because launches compute nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from gpuscore.backends.torch import backend as backend_module
from gpuscore.backends.torch import graph_launcher as launcher_module
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.plan import plan_backend
from gpuscore.config import ModelConfig
from support.product_frames import product_line
from support.streams.device import playing
from support.streams.dispatch import Dispatch
from support.streams.kernels import launcher
from support.streams.recorder import Recorder
from support.streams.tensors import DEVICE, spans_of
from support.streams.turns import TurnExecutor

PAGE_BYTES = 64 * 256  # 64 tokens; two layers of keys and values of 16 float32 numbers


@dataclass(frozen=True, slots=True)
class Setup:
    """Limits of one backend."""

    max_batch_tokens: int
    graph_tokens: int | None  # None = operator after operator, without our row-wise kernels
    pages: int
    int8: bool = False  # linear layers, of a dense model


SETUPS = (Setup(64, 40, 9), Setup(40, 40, 5), Setup(120, 32, 16), Setup(48, 0, 6))
INT8 = (Setup(64, 40, 9, int8=True), Setup(48, 0, 6, int8=True))
PLAIN = Setup(48, None, 6)


def setup_of(group: int) -> Setup:
    """Return the limits for a group of worlds: of ten, one runs the `PlainLauncher`, one INT8."""
    if group % 10 == 9:
        return PLAIN
    return INT8[group // 10 % len(INT8)] if group % 10 == 8 else SETUPS[group % len(SETUPS)]


class FreeBuffers(list[Any]):
    """The launcher's free buffers: a handover from the thread that returns one to that which takes
    it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def append(self, buffers: Any) -> None:
        recorder = self.recorder
        recorder.turns.pause()
        memory = (buffers.host, buffers.device, buffers.answer)
        spans = [span for tensor in memory for span in spans_of(tensor)]
        recorder.checker.hand_back(recorder.thread, id(buffers), spans, product_line())
        recorder.release(("buffers", id(buffers)))
        super().append(buffers)

    def pop(self, *at: Any) -> Any:
        buffers = super().pop(*at)
        self.recorder.acquire(("buffers", id(buffers)))
        self.recorder.checker.take(id(buffers))
        return buffers


def watched(recorder: Recorder) -> type:
    """Return the product's launcher with `FreeBuffers`."""

    class Watched(launcher_module.GraphLauncher):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if self._free != []:
                raise NotImplementedError("the launcher starts with buffers")
            self._free = FreeBuffers(recorder)

    return Watched


@contextmanager
def device_of(recorder: Recorder) -> Iterator[None]:
    """Let the product find the recorder's device, on this thread and on its backends' threads."""
    replacements = {
        "ThreadPoolExecutor": lambda **_: TurnExecutor(
            recorder.turns, recorder, lambda: Dispatch(recorder)
        ),
        "GraphLauncher": watched(recorder),
    }
    with (
        playing(recorder, launcher(recorder)),
        mock.patch.multiple(backend_module, **replacements),
        mock.patch.object(TorchBackend, "_check"),
        Dispatch(recorder),
    ):
        yield


def make_backend(directory: Path, setup: Setup) -> TorchBackend:
    """Load the product's backend, within `device_of`."""
    directory = directory / "dense" if setup.int8 else directory
    config = ModelConfig(
        str(directory),
        device="cuda",
        dtype="float32",
        attention="triton",
        quantization="int8" if setup.int8 else "auto",
        kernels="torch" if setup.graph_tokens is None else "triton",
        max_batch_tokens=setup.max_batch_tokens,
        max_model_len=128,
        cuda_graph_tokens=setup.graph_tokens,
        kv_cache_size=setup.pages * PAGE_BYTES,
    )
    # torch would ask the driver for the number of a device without one.
    plan = plan_backend(directory, config)
    plan = replace(plan, device=DEVICE)
    made = backend_module.TorchBackend(plan)
    made.warmup()
    return made
