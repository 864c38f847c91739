"""`torch.cuda` for a device that is not there: streams, events, graphs and memory of a recorder."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from support.one_device import one_device
from support.streams.checker import Span
from support.streams.recorder import DEFAULT, Capture, Node, Recorder, without_recording

CAPABILITY = (9, 0)
MEMORY = 2**30  # bytes


class FakeStream:
    """A stream of the recorder's device."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = event or FakeEvent(self.recorder)
        event.record(self)
        return event

    def wait_event(self, event: "FakeEvent") -> None:
        self.recorder.wait(self.name, event.number)

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.recorder.synchronise(self.name)


class FakeEvent:
    """An event; waiting for one that was never recorded is no wait, as in CUDA."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.number = recorder, recorder.number()

    def record(self, stream: FakeStream | None = None) -> None:
        self.recorder.record(stream.name if stream else self.recorder.stream, self.number)

    def wait(self, stream: FakeStream | None = None) -> None:
        self.recorder.wait(stream.name if stream else self.recorder.stream, self.number)

    def synchronize(self) -> None:
        self.recorder.synchronise_event(self.number)


class FakeGraph:
    """A captured graph; `replay` runs its operations again, on the memory of the capture.

    All graphs share one block that stands for the memory that only graphs use, because a pool may
    give it to each of them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.nodes: list[Node] = []
        self.reads: list[Span] = []
        self.writes: list[Span] = []

    def close(self, capture: Capture) -> None:
        """Take over the work of a finished capture."""
        self.nodes = capture.nodes
        pool = Span(capture.pool, 0, 1)
        reads = {s: None for node in self.nodes for s in node.reads}
        writes = {s: None for node in self.nodes for s in node.writes}
        self.reads = [s for s in reads if s.block not in capture.blocks and s not in writes]
        self.writes = [pool, *(s for s in writes if s.block not in capture.blocks)]

    def replay(self) -> None:
        def again() -> None:
            for node in self.nodes:
                node.again()

        name = f"replay of a graph of {len(self.nodes)} operations"
        if not self.recorder.launch(name, self.reads, self.writes, again):
            with without_recording():
                again()


class FakeCuda:
    """Functions and classes in the place of `torch.cuda`'s."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._streams = 0
        self._captures = self.stream_of("capturing")
        self._pool = recorder.number()

    def stream_of(self, name: str) -> FakeStream:
        return FakeStream(self.recorder, name)

    def new_stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        self._streams += 1
        return self.stream_of(f"stream {self._streams}")

    def current_stream(self, device: Any = None) -> FakeStream:
        return self.stream_of(self.recorder.stream)

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.recorder.stream = self.recorder.stream, stream.name
        try:
            yield
        finally:
            self.recorder.stream = before

    @contextmanager
    def capturing(
        self,
        graph: FakeGraph,
        pool: Any = None,
        stream: FakeStream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        recorder = self.recorder
        recorder.synchronise()
        stream = stream or self._captures
        with self.on_stream(stream):
            capture = recorder.captures[recorder.thread] = Capture(stream.name, self._pool)
            try:
                yield
            finally:
                del recorder.captures[recorder.thread]
        graph.close(capture)

    def memory(self, device: Any = None) -> tuple[int, int]:
        return MEMORY - self.recorder.live, MEMORY

    def reset_peak(self, device: Any = None) -> None:
        self.recorder.peak = self.recorder.live

    def replacements(self) -> Mapping[str, Any]:
        """Return what takes the place of each name in `torch.cuda`."""
        recorder = self.recorder
        return {
            **one_device("a CPU that plays a GPU", CAPABILITY),
            "Stream": self.new_stream,
            "Event": lambda *a, **k: FakeEvent(recorder),
            "stream": self.on_stream,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.stream_of(DEFAULT),
            "synchronize": lambda device=None: recorder.synchronise(),
            "CUDAGraph": lambda *a, **k: FakeGraph(recorder),
            "graph": self.capturing,
            "graph_pool_handle": lambda: "the pool of graphs",
            "mem_get_info": self.memory,
            "memory_reserved": lambda device=None: recorder.live,
            "max_memory_reserved": lambda device=None: recorder.peak,
            "reset_peak_memory_stats": self.reset_peak,
            "empty_cache": lambda: None,
        }


@contextmanager
def playing(recorder: Recorder, launch: Callable[..., Any]) -> Iterator[FakeCuda]:
    """Let `torch.cuda` be the recorder's device; Triton launches go to `launch`.

    `launch` returns None, so `CachedLaunch` finds no code to remember and comes here every time.
    """
    from triton.runtime.jit import JITFunction

    cuda = FakeCuda(recorder)
    # This binding asks for a CUDA device before it dispatches; on a CPU it does nothing else.
    nonzero = torch.ops.aten.nonzero.default
    with (
        mock.patch.multiple(torch.cuda, **cuda.replacements()),
        mock.patch.object(torch, "nonzero", nonzero),
        mock.patch.object(JITFunction, "run", launch),
    ):
        yield cuda
