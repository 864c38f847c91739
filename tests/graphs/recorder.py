"""Records what the product does on a CUDA device that is not there.

Tensors of the device are torch's meta tensors: they have shapes and storages, no contents. A
`Recorder` is a dispatch mode below torch's Python interface. It turns the device "cuda" into
"meta", and notes every operator that launches a kernel, every copy, every place where the host
waits for the device, and the memory that is taken as torch's allocator counts it. Host tensors are
real. What a device would answer the host is invented: zeros. An operator whose result's shape
depends on contents, for which a host would wait, fails.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
META = torch.device("meta")
# Operators that make no work for the device.
IDLE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
IDLE |= {aten._unsafe_view, aten.lift_fresh, aten.detach, aten.alias, aten.resize_}
UNIT = 512  # bytes; every allocation is a multiple of it


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of one storage."""

    address: int
    size: int
    capture: int  # number of the capture in which it was allocated; 0 = none
    where: str  # the line that allocated it


@dataclass(slots=True)
class Pool:
    """Bytes that are in use, and that the allocator holds. Graphs have a pool of their own."""

    live: int = 0
    reserved: int = 0


@dataclass(slots=True)
class Capture:
    """One captured graph."""

    number: int
    launches: list[str] = field(default_factory=list)
    # Memory from outside of the capture that its kernels use, and the line that allocated it.
    outside: dict[int, tuple[weakref.ref[Any], str]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Log of a device of `total` bytes.

    Attributes:
        launches: kernels and copies in order, without those of replays.
        waits: places where the host waited.
        problems: what no device allows, or what would corrupt results.
        captures: all graphs, in order.
        replays: how many there were.
        pinned: allocations of pinned memory.
        peak: most bytes that the allocator held.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.peak = total, 0
        self.ordinary, self.of_graphs = Pool(), Pool()
        self.blocks: dict[int, Block] = {}  # by storage
        self.launches: list[str] = []
        self.waits: list[str] = []
        self.problems: list[str] = []
        self.captures: list[Capture] = []
        self.capturing: Capture | None = None
        self.replays = self.pinned = 0
        self.main = self.stream = None  # streams: the one for all work, the current one
        self._pinned: dict[int, weakref.ref[Any]] = {}
        self._next = itertools.count(0x7F00_0000_0000, 2**40)
        self._handlers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense: self._scalar,
            aten._to_copy: self._to_copy,
            aten.copy_: self._copy,
            aten.empty: self._empty,
            aten.is_pinned: lambda _, x: self._is_pinned(x),
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which takes seconds."""
        return False

    # ---- what the device does ----

    @property
    def reserved(self) -> int:
        return self.ordinary.reserved + self.of_graphs.reserved

    def empty_cache(self) -> None:
        self.ordinary.reserved = self.ordinary.live

    def begin_capture(self) -> Capture:
        self.capturing = Capture(len(self.captures) + 1)
        self.captures.append(self.capturing)
        return self.capturing

    def end_capture(self) -> None:
        capture, self.capturing = self.capturing, None
        assert capture is not None
        for block in self.blocks.values():
            if block.capture == capture.number:
                self.problem(
                    f"{block.size} bytes that capture {capture.number} allocated at {block.where} "
                    "are still used after it: the next capture writes to the same memory"
                )

    def replay(self, capture: Capture) -> None:
        self.replays += 1
        for storage, where in capture.outside.values():
            if storage() is None:
                self.problem(f"a graph uses memory of {where} that has been freed since")

    def launched(self, name: str, used: Sequence[Tensor]) -> None:
        """Note a launch whose kernel uses these tensors of the device."""
        self.launches.append(name)
        if self.capturing is None:
            if self.stream is not self.main:
                self.problem(f"{name} on another stream: nothing orders it, at {product_line()}")
            return
        self.capturing.launches.append(name)
        for tensor in used:
            storage = tensor.untyped_storage()
            block = self.blocks[storage._cdata]
            if block.capture != self.capturing.number:
                entry = weakref.ref(storage), block.where
                self.capturing.outside.setdefault(storage._cdata, entry)

    def waited(self, what: str) -> None:
        self.waits.append(f"{what}, at {product_line()}")
        self.forbidden(what)

    def forbidden(self, what: str) -> None:
        """Note what a capture must not do."""
        if self.capturing is not None:
            self.problem(f"{what} inside a capture, at {product_line()}")

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def allocated(self, tensor: Tensor) -> None:
        """Give memory to a tensor's storage, unless it has some."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.blocks:
            return
        size = -(-storage.nbytes() // UNIT) * UNIT
        pool = self.ordinary if self.capturing is None else self.of_graphs
        pool.live += size
        pool.reserved = max(pool.reserved, pool.live)
        self.peak = max(self.peak, self.reserved)
        number = self.capturing.number if self.capturing else 0
        self.blocks[storage._cdata] = Block(next(self._next), size, number, product_line())
        weakref.finalize(storage, self._free, storage._cdata, pool)

    def _free(self, key: int, pool: Pool) -> None:
        pool.live -= self.blocks.pop(key).size

    def address(self, tensor: Tensor) -> int:
        """Return what `data_ptr` returns on a device: 0 for a tensor without elements."""
        if tensor.numel() == 0:
            return 0
        if not tensor.is_meta:
            raise ValueError(f"a tensor of the host, {tuple(tensor.shape)}, is given to a kernel")
        block = self.blocks[tensor.untyped_storage()._cdata]
        return block.address + tensor.storage_offset() * tensor.element_size()

    # ---- torch's operators ----

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args = [_on_meta(x) for x in args]
        kwargs = {name: _on_meta(x) for name, x in (kwargs or {}).items()}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        handler = self._handlers.get(func.overloadpacket)
        if handler is not None and (done := handler(func, *args, **kwargs)) is not None:
            return done
        used = _tensors([*args, *kwargs.values()])
        if any(x.is_meta for x in used) and any(not x.is_meta and x.dim() for x in used):
            raise RuntimeError(f"{func}: tensors of the device and of the host")
        result = func(*args, **kwargs)
        made = [x for x in _tensors([result]) if x.is_meta]
        for tensor in made:
            self.allocated(tensor)
        works = not func.is_view and func.overloadpacket not in IDLE
        if works and any(x.is_meta and x.numel() for x in made or used):
            self.launched(func.name().partition(".")[0], [x for x in used if x.is_meta])
        return result

    def _scalar(self, func: OpOverload, x: Tensor) -> Any:
        if not x.is_meta:
            return None
        self.waited("a number that the host reads")
        return True if x.dtype == torch.bool else 0.0

    def _to_copy(self, func: OpOverload, x: Tensor, **options: Any) -> Any:
        target, dtype = options.get("device") or x.device, options.get("dtype") or x.dtype
        if x.is_meta and target.type == "cpu":
            self.waited("a copy to the host")
            return torch.zeros(x.shape, dtype=dtype)
        if not x.is_meta and target == META:
            self._uploaded(x, options.get("non_blocking", False))
            made = torch.empty(x.shape, dtype=dtype, device=META)
            self.allocated(made)
            return made
        return None

    def _copy(self, func: OpOverload, to: Tensor, source: Tensor, non_blocking: Any = False) -> Any:
        if to.is_meta == source.is_meta:
            return None
        if to.is_meta:
            self._uploaded(source, non_blocking)
            return to
        if not (non_blocking and self._is_pinned(to)):
            self.waited("a copy to the host")
        self._copied("download")
        return to.zero_()

    def _uploaded(self, source: Tensor, non_blocking: bool) -> None:
        if not (non_blocking and self._is_pinned(source)):
            self.waited("a copy from the host")
        self._copied("upload")

    def _copied(self, name: str) -> None:
        self.forbidden(name)
        self.launched(name, ())

    def _empty(self, func: OpOverload, *args: Any, **options: Any) -> Any:
        if not options.get("pin_memory"):
            return None
        self.forbidden("pinned memory is allocated")
        self.pinned += 1
        fresh = func(*args, **(options | {"pin_memory": False}))
        storage = fresh.untyped_storage()
        self._pinned[storage._cdata] = weakref.ref(storage)
        return fresh

    def _is_pinned(self, tensor: Tensor) -> bool:
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and known() is not None


def product_line() -> str:
    """Return the folder, file and line of the product's innermost frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("gpuscore"):
        frame = frame.f_back
    if frame is None:
        return "outside of the product"
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"


def _on_meta(value: Any) -> Any:
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples of them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors
