"""`torch.cuda` and Triton's driver for a device that is not there.

The product's own code runs: queue, memory measurement, graph runner, kernels' launch functions.
torch's functions that would reach for the driver are replaced for a while, one by one.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from graphs.recorder import Capture, Recorder
from graphs.triton_driver import TritonLog, stub_triton
from support.one_device import one_device


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Properties that a device tells."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes
    shared: int  # bytes of shared memory that a block may have


NODE_BYTES = 4096  # of a graph's executable, invented
H200 = DeviceKind("H200", (9, 0), 141 * 10**9, 227 * 1024)


class Stream:
    """A stream, whose work is recorded in the order of the host's calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def wait_stream(self, other: "Stream") -> None:
        """Order two streams; the happens-before checker looks at these."""

    def wait_event(self, event: "Event") -> None:
        """Order this stream behind an event."""

    def synchronize(self) -> None:
        self._recorder.waited("a stream's synchronize")


class Event:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def record(self, stream: Stream | None = None) -> None:
        """Mark a place in a stream."""

    def synchronize(self) -> None:
        self._recorder.waited("an event's synchronize")


class Graph:
    """A CUDA graph: a capture is recorded, a replay checks that its memory is still there."""

    def __init__(self, recorder: Recorder, own_pool: int) -> None:
        self._recorder, self._own_pool = recorder, own_pool
        self._capture: Capture | None = None

    def capture_begin(self, pool: int | None = None, **options: Any) -> None:
        pool = self._own_pool if pool is None else pool
        self._capture = self._recorder.begin_capture(pool)
        self._recorder.heap.own(pool, self)

    def capture_end(self) -> None:
        assert self._capture is not None
        self._recorder.end_capture()
        self._recorder.heap.take_beside(self, NODE_BYTES * len(self._capture.launches))

    def replay(self) -> None:
        assert self._capture is not None
        self._recorder.replay(self._capture)


class CudaModule:
    """The functions of `torch.cuda` that the product and torch's own `graph` call."""

    def __init__(self, kind: DeviceKind, recorder: Recorder) -> None:
        self._kind, self._recorder = kind, recorder
        self._main = Stream(recorder)
        self._current = [self._main]
        self._handles = itertools.count(1)

    def functions(self) -> dict[str, Any]:
        heap = self._recorder.heap
        return {
            **one_device(self._kind.name, self._kind.capability),
            "mem_get_info": lambda device=None: (
                heap.total - heap.reserved - heap.beside,
                heap.total,
            ),
            "memory_reserved": lambda device=None: heap.reserved,
            "memory_allocated": lambda device=None: heap.live,
            "max_memory_reserved": lambda device=None: heap.peak,
            "reset_peak_memory_stats": lambda device=None: heap.forget_peak(),
            "empty_cache": self._empty_cache,
            "synchronize": lambda device=None: self._recorder.waited("torch.cuda.synchronize"),
            "graph_pool_handle": lambda: next(self._handles),
            "Stream": lambda device=None, **options: Stream(self._recorder),
            "Event": lambda **options: Event(self._recorder),
            "CUDAGraph": lambda **options: Graph(self._recorder, next(self._handles)),
            "current_stream": lambda device=None: self._current[-1],
            "stream": self._stream,
        }

    def _empty_cache(self) -> None:
        if self._recorder.capturing is not None:
            self._recorder.problem("torch.cuda.empty_cache inside a capture")
        self._recorder.heap.empty_cache()

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()


@contextmanager
def device(kind: DeviceKind) -> Iterator[tuple[Recorder, TritonLog]]:
    """Put a device in the place of CUDA's, for the calling thread's torch calls and for Triton.

    Other threads enter the recorder themselves.
    """
    recorder = Recorder(kind.memory)
    with ExitStack() as stack:
        for name, function in CudaModule(kind, recorder).functions().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch.cuda.graph, "default_capture_stream", None))
        stack.enter_context(mock.patch.object(torch._C, "_host_emptyCache", create=True))
        log = stack.enter_context(stub_triton(recorder, kind.capability, kind.shared))
        # Outside of it, torch resolves "cuda" before a dispatch mode sees it.
        stack.enter_context(torch.inference_mode())
        stack.enter_context(recorder)
        yield recorder, log
