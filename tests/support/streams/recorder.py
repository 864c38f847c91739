"""The recorder: what threads, streams and the allocator do, told to the checker as it happens."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from support.product_frames import product_line
from support.streams.checker import Checker, Span
from support.streams.turns import Turns

DEFAULT = "the default stream"

without_recording = torch._C._DisableTorchDispatch


@dataclass(slots=True)
class Node:
    """One operation of a captured graph."""

    name: str
    where: str
    reads: Sequence[Span]
    writes: Sequence[Span]
    again: Callable[[], object]


@dataclass(slots=True)
class Capture:
    """A capture under way: the stream that is captured, and its work so far."""

    stream: str
    pool: int  # block that stands for all memory that only graphs use
    nodes: list[Node] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)  # allocated meanwhile


class Faults:
    """Errors that the device raises; the base raises none."""

    lost = False

    def at_allocation(self) -> None:
        """Raise torch.OutOfMemoryError, or do nothing."""

    def at_call(self) -> None:
        """Raise the error of any call of the device's library, or do nothing."""


class Block:
    """Device memory of one allocation; when the last tensor over it dies, it is free."""

    __slots__ = ("number", "recorder", "stream")

    def __init__(self, recorder: "Recorder", number: int, stream: str) -> None:
        self.recorder, self.number, self.stream = recorder, number, stream

    def __del__(self) -> None:
        self.recorder.free(self)


class Recorder:
    """Sees every operation of all threads; `turns` decides which thread goes on after each.

    Args:
        turns: of the two threads.
    """

    def __init__(self, turns: Turns) -> None:
        self.checker = Checker()
        self.turns, self.faults = turns, Faults()
        self.captures: dict[str, Capture] = {}  # by thread
        self.live = self.peak = 0  # bytes of device memory
        self.closed = False  # the device is gone, and memory that is still referenced with it
        self._local = threading.local()
        self._numbers = 0
        self._pinned: list[tuple[int, int, int, Tensor]] = []  # address, end, block, memory
        self._sizes: dict[int, int] = {}

    # ---- where we are ----

    @property
    def thread(self) -> str:
        return self.turns.name

    @property
    def stream(self) -> str:
        """Name of the thread's current stream."""
        return getattr(self._local, "stream", DEFAULT)

    @stream.setter
    def stream(self, name: str) -> None:
        self._local.stream = name

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ---- device memory ----

    def allocate(self, memory: Tensor) -> Block:
        """Hand out device memory, of the size of a CPU tensor's, to the current stream."""
        self.faults.at_allocation()
        size = memory.untyped_storage().nbytes()
        block = Block(self, self.number(), self.stream)
        self._sizes[block.number] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        capture = self.captures.get(self.thread)
        if capture is not None:
            capture.blocks.add(block.number)
        else:
            self.checker.allocate(self.thread, block.stream, block.number, size, product_line())
        return block

    def free(self, block: Block) -> None:
        if self.closed:
            return
        self.live -= self._sizes.pop(block.number, 0)
        if self.faults.lost:  # no later work can get this memory
            self.checker.forget(block.number)
        else:
            self.checker.free(self.thread, block.stream, block.number, "last reference dropped")

    # ---- pinned memory ----

    def pin(self, memory: Tensor) -> None:
        """Register pinned memory; it is kept, so that no other memory gets its address."""
        start = memory.data_ptr()
        block = self.number()
        self._pinned.append((start, start + memory.numel() * memory.itemsize, block, memory))

    def pinned(self, start: int, end: int) -> list[Span]:
        """Return what of the addresses [start, end) is pinned."""
        return [
            Span(block, max(start, first) - first, min(end, last) - first)
            for first, last, block, _ in self._pinned
            if start < last and first < end
        ]

    # ---- operations ----

    def launch(
        self,
        name: str,
        reads: Sequence[Span],
        writes: Sequence[Span],
        again: Callable[[], object],
    ) -> bool:
        """Put work into the current stream; True if it is captured and so must not run now.

        Args:
            name: of the operation.
            reads, writes: memory that it touches.
            again: repeats it on the same memory, for graphs.
        """
        self._before()
        capture = self.captures.get(self.thread)
        if capture is not None:
            if capture.stream != self.stream:
                raise NotImplementedError("a capture of more than one stream")
            capture.nodes.append(Node(name, product_line(), reads, writes, again))
            return True
        self.run(name, product_line(), reads, writes)
        return False

    def run(self, name: str, where: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        self.checker.on_stream(self.thread, self.stream, name, where, reads, writes)

    def host(self, name: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """Record an access of this thread to pinned memory."""
        if reads or writes:
            self.turns.pause()
            where = product_line()
            self.checker.on_host(self.thread, name, where, reads, writes)

    # ---- order ----

    def record(self, stream: str, event: int) -> None:
        self._before()
        self._refuse_capture("an event recorded")
        self.checker.record(self.thread, stream, event)

    def wait(self, stream: str, event: int) -> None:
        self._before()
        self._refuse_capture("a stream that waits")
        self.checker.wait(self.thread, stream, event)

    def synchronise_event(self, event: int) -> None:
        self._before()
        self._refuse_capture("a thread that waits")
        self.checker.synchronise_event(self.thread, event)

    def synchronise(self, stream: str | None = None) -> None:
        """Let the thread wait for a stream, or for the device (None)."""
        self._before()
        self._refuse_capture("a thread that waits")
        self.checker.synchronise(self.thread, stream)

    def release(self, handover: object) -> None:
        self.checker.release(self.thread, handover)

    def acquire(self, handover: object) -> None:
        self.checker.acquire(self.thread, handover)

    # ---- inside ----

    def _before(self) -> None:
        self.turns.pause()
        self.faults.at_call()

    def _refuse_capture(self, what: str) -> None:
        if self.thread in self.captures:
            raise RuntimeError(f"CUDA error: {what} while the thread's stream is captured")
