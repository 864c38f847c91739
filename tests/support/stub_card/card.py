"""The card: a recorder that checks nothing, and what `torch.cuda` says of the device."""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from support.one_device import one_device
from support.streams.checker import Span
from support.streams.device import CAPABILITY, MEMORY, FakeCuda, FakeEvent, FakeGraph
from support.streams.dispatch import Dispatch
from support.streams.kernels import launcher
from support.streams.recorder import Block, Node, Recorder
from support.streams.tensors import DEVICE
from support.streams.turns import Turns
from support.stub_card.libraries import library_functions, own_operators

aten = torch.ops.aten
MULTIPROCESSORS = 132


class Player(Recorder):
    """Lets every operation happen at once, on whatever thread it comes from, and counts memory."""

    def __init__(self) -> None:
        super().__init__(Turns(0))
        self.profiled: list[tuple[str, float]] | None = None  # operations with the time of each
        self.modes: tuple[Any, ...] = ()  # of the process's first thread, in force to its end
        self.lost_after: int | None = None  # operations, after which every call fails

    @property
    def thread(self) -> str:
        return str(threading.get_ident())

    def allocate(self, memory: Tensor) -> Block:
        size = memory.untyped_storage().nbytes()
        block = Block(self, self.number(), self.stream)
        self._sizes[block.number] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        if (capture := self.captures.get(self.thread)) is not None:
            capture.blocks.add(block.number)
        return block

    def free(self, block: Block) -> None:
        self.live -= self._sizes.pop(block.number, 0)

    def pin(self, memory: Tensor) -> None:
        pass

    def launch(
        self,
        name: str,
        reads: Sequence[Span],
        writes: Sequence[Span],
        again: Callable[[], object],
    ) -> bool:
        self._fail_if_lost()
        if self.profiled is not None:
            self.profiled.append((name, time.perf_counter()))
        capture = self.captures.get(self.thread)
        if capture is not None:
            capture.nodes.append(Node(name, "", reads, writes, again))
        return capture is not None

    def host(self, name: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        pass

    def record(self, stream: str, event: int) -> None:
        self._refuse_capture("an event recorded")

    def wait(self, stream: str, event: int) -> None:
        self._refuse_capture("a stream that waits")

    def synchronise_event(self, event: int) -> None:
        self._refuse_capture("a thread that waits")

    def synchronise(self, stream: str | None = None) -> None:
        self._fail_if_lost()
        self._refuse_capture("a thread that waits")

    def _fail_if_lost(self) -> None:
        if self.lost_after is not None:
            self.lost_after -= 1
            if self.lost_after < 0:
                raise torch.AcceleratorError("CUDA error: unspecified launch failure (played)")


class TimedEvent(FakeEvent):
    """An event with a time; work before it is done when it is recorded."""

    seconds = 0.0

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "TimedEvent") -> float:
        """Return milliseconds."""
        return 1e3 * (later.seconds - self.seconds)


class CardDispatch(Dispatch):
    """Operators of whole programs: also `to` with a device that has no number, and `own_operators`,
    which torch has for CUDA only."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._special |= {
            aten.to.device: self._to_device,
            aten.to.dtype: self._to_dtype,
            aten.to.dtype_layout: self._to_layout,
            aten.to.other: self._to_other,
            aten._has_compatible_shallow_copy_type.default: lambda one, other: (
                type(one) is type(other)
            ),
            **own_operators(self.place, recorder),
        }

    def _to_device(
        self, x: Tensor, device: Any, dtype: Any, non_blocking: bool = False, copy: bool = False,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        return self._moved(x, device, dtype, non_blocking, copy)

    def _to_dtype(
        self, x: Tensor, dtype: Any, non_blocking: bool = False, copy: bool = False, **_: Any
    ) -> Tensor:
        return self._moved(x, None, dtype, non_blocking, copy)

    def _to_layout(
        self,
        x: Tensor,
        *,
        dtype: Any = None,
        device: Any = None,
        non_blocking: bool = False,
        copy: bool = False,
        **_: Any,
    ) -> Tensor:
        return self._moved(x, device, dtype, non_blocking, copy)

    def _to_other(
        self, x: Tensor, other: Tensor, non_blocking: bool = False, copy: bool = False, **_: Any
    ) -> Tensor:
        return self._moved(x, other.device, other.dtype, non_blocking, copy)

    def _moved(self, x: Tensor, device: Any, dtype: Any, non_blocking: bool, copy: bool) -> Tensor:
        target = x.device if device is None else torch.device(device)
        dtype = dtype or x.dtype
        if target.type == x.device.type and dtype == x.dtype and not copy:
            return x
        where = DEVICE if target.type == "cuda" else target
        return self._to_copy(x, device=where, dtype=dtype, non_blocking=non_blocking)


def put_in(name: str) -> Player:
    """Put the card into this process, for good, for all its threads.

    Args:
        name: what torch calls the card.
    """
    from triton.runtime.jit import JITFunction

    player = Player()
    cuda = FakeCuda(player)
    about = SimpleNamespace(
        name=name,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=MULTIPROCESSORS,
        total_memory=MEMORY,
    )
    answers = {
        **cuda.replacements(),
        **one_device(name, CAPABILITY),
        "init": lambda: None,
        "get_device_properties": lambda device=None: about,
        "Event": _class(lambda *a, **k: TimedEvent(player)),
        "Stream": _class(cuda.new_stream),
        "CUDAGraph": _class(lambda *a, **k: FakeGraph(player)),
        "_sleep": lambda cycles: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for owner, values in (
        (torch.cuda, answers),
        (torch, {"nonzero": aten.nonzero.default}),
        (JITFunction, {"run": launcher(player)}),
        *library_functions(player),
    ):
        for attribute, value in values.items():
            setattr(owner, attribute, value)
    _enter_on_all_threads(player)
    return player


def _class(make: Callable[..., object]) -> type:
    """Return a class whose calls call `make`: libraries name these classes in annotations."""
    return type("Made", (), {"__new__": lambda cls, *args, **options: make(*args, **options)})


def _enter_on_all_threads(player: Player) -> None:
    """Enter the dispatch mode on this thread and on those to come.

    Outside of inference mode, torch resolves "cuda" before a dispatch mode sees it.
    """
    start = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def started(thread: threading.Thread) -> None:
        with torch.inference_mode(), CardDispatch(player):
            start(thread)

    threading.Thread._bootstrap_inner = started  # type: ignore[attr-defined]
    player.modes = (torch.inference_mode(), CardDispatch(player))
    for mode in player.modes:
        mode.__enter__()
