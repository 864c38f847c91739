"""Records what the product does on a CUDA device that is not there.

Tensors of the device are torch's meta tensors: they have shapes and storages, no contents. A
`Recorder` is a dispatch mode below torch's Python interface. It turns the device "cuda" into
"meta", gives every storage an address in a `DeviceHeap`, and writes down every operator that
launches a kernel, every copy, and every place where the host waits for the device. Host tensors are
real. What a device would answer the host is invented: zeros.

FakeTensorMode would do the same slower, and on a CPU wheel it fails where torch looks for CUDA's
device guard.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.heap import ORDINARY, DeviceHeap
from support.product_frames import product_function, product_line

aten = torch.ops.aten
META = torch.device("meta")
# Operators that make no work for the device.
IDLE = frozenset(
    getattr(aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
) | {aten._unsafe_view, aten.lift_fresh, aten.detach, aten.alias, aten.resize_}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's launch: by Triton, or by one of torch's operators."""

    kind: str  # "triton" or "torch"
    name: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A place where the host waits for the device."""

    what: str
    where: str
    capture: int  # number of the capture during which it happened; 0 = none


@dataclass(slots=True)
class Capture:
    """One captured graph."""

    number: int
    pool: int
    launches: list[Launch] = field(default_factory=list)
    # Memory from outside of the capture that its kernels use, and the line that allocated it.
    outside: dict[int, tuple[weakref.ref[Any], str]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Log of a device of `total` bytes.

    Attributes:
        launches: in order, without the launches of replays.
        waits: places where the host waited.
        problems: what no device allows, or what would corrupt results.
        captures: all graphs, in order.
        replays: of each graph by number.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.heap = DeviceHeap(total)
        self.launches: list[Launch] = []
        self.waits: list[Wait] = []
        self.problems: list[str] = []
        self.captures: list[Capture] = []
        self.capturing: Capture | None = None
        self.replays: dict[int, int] = {}
        self._pinned: dict[int, weakref.ref[Any]] = {}
        self._handler_of = self._handlers()
        self._forms: dict[Any, Any] = {}  # of results, by operator and arguments

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which takes seconds."""
        return False

    # ---- what the device does ----

    def begin_capture(self, pool: int) -> Capture:
        self.capturing = Capture(len(self.captures) + 1, pool)
        self.captures.append(self.capturing)
        return self.capturing

    def end_capture(self) -> None:
        capture, self.capturing = self.capturing, None
        assert capture is not None
        for block in self.heap.allocated_in(capture.number):
            self.problem(
                f"{block.size} bytes that capture {capture.number} allocated at {block.where} are "
                "still used after it: the next capture writes to the same memory"
            )

    def replay(self, capture: Capture) -> None:
        self.replays[capture.number] = self.replays.get(capture.number, 0) + 1
        for storage, where in capture.outside.values():
            if storage() is None:
                self.problem(
                    f"graph {capture.number} uses memory of {where} that has been freed since"
                )

    def launched(self, kind: str, name: str, used: Sequence[Tensor]) -> None:
        """Note a launch whose kernel uses these tensors of the device."""
        launch = Launch(kind, name)
        self.launches.append(launch)
        if self.capturing is None:
            return
        self.capturing.launches.append(launch)
        for tensor in used:
            block = self.heap.block_of(tensor)
            if block.capture != self.capturing.number:
                storage = tensor.untyped_storage()
                entry = weakref.ref(storage), block.where
                self.capturing.outside.setdefault(storage._cdata, entry)

    def waited(self, what: str) -> None:
        number = self.capturing.number if self.capturing else 0
        self.waits.append(Wait(what, product_function(), number))
        if number:
            self.problem(f"{what} inside capture {number}, at {product_line()}")

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

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
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        handler = self._handler_of.get(func.overloadpacket)
        if handler is not None and (done := handler(func, args, kwargs)) is not None:
            return done
        used = _tensors(args) + _tensors(kwargs.values())
        self._check_devices(func, used)
        result = self._result(func, args, kwargs, used)
        self._note(func, used, result)
        return result

    def _result(
        self, func: OpOverload, args: list[Any], kwargs: dict[str, Any], used: Sequence[Tensor]
    ) -> Any:
        """Run an operator, but make a tensor of the device by itself if its shape is known.

        torch computes many shapes in Python, which takes a good part of a forward pass here.
        """
        if not _makes_its_results(func) or not used or not all(x.is_meta for x in used):
            return func(*args, **kwargs)
        asked = func, _form(args), _form(kwargs.items())
        if (known := self._forms.get(asked)) is not None:
            return torch.empty_strided(known[0], known[1], dtype=known[2], device=META)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._forms[asked] = result.shape, result.stride(), result.dtype
        return result

    def _handlers(self) -> "dict[Any, Callable[..., Any]]":
        return {
            aten._local_scalar_dense: self._scalar,
            aten._to_copy: self._to_copy,
            aten.copy_: self._copy,
            aten.empty: self._empty,
            aten._pin_memory: self._pin,
            aten.is_pinned: lambda _, args, kwargs: self._is_pinned(args[0]),
            aten.bincount: self._bincount,
            aten.nonzero: self._nonzero,
            aten.index: self._index,
            aten.masked_select: self._refuse,
            aten._unique2: self._refuse,
            aten.equal: self._refuse,
        }

    def _note(self, func: OpOverload, used: Sequence[Tensor], result: Any) -> None:
        made = [x for x in _tensors(result) if x.is_meta]
        for tensor in made:
            self.allocated(tensor)
        writes = made or [x for x in used if x.is_meta]
        if not writes or func.is_view or func.overloadpacket in IDLE:
            return
        if any(x.numel() for x in writes):
            self.launched("torch", func.overloadpacket._qualified_op_name, [*used, *made])

    def allocated(self, tensor: Tensor) -> None:
        capture = self.capturing
        pool, number = (capture.pool, capture.number) if capture else (ORDINARY, 0)
        if tensor.untyped_storage()._cdata not in self.heap.blocks:
            self.heap.add(tensor, pool, number, product_line())

    def _check_devices(self, func: OpOverload, used: Sequence[Tensor]) -> None:
        """Refuse what torch refuses: tensors of two devices, except scalars of the host."""
        if any(x.is_meta for x in used) and any(not x.is_meta and x.dim() for x in used):
            raise RuntimeError(f"{func}: tensors of the device and of the host")

    def _scalar(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not args[0].is_meta:
            return None
        self.waited("a number that the host reads")
        return True if args[0].dtype == torch.bool else 0.0

    def _to_copy(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        source, target = args[0], kwargs.get("device", args[0].device)
        if source.is_meta and target.type == "cpu":
            self.waited("a copy to the host")
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if not source.is_meta and target.type == "meta":
            self._uploaded(source, kwargs.get("non_blocking", False))
            made = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=META)
            self.allocated(made)
            return made
        return None

    def _copy(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target, source = args[:2]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if target.is_meta == source.is_meta:
            return None
        if target.is_meta:
            self._uploaded(source, not waits)
        else:
            if waits or not self._is_pinned(target):
                self.waited("a copy to the host")
            self._noted_copy("download")
            target.zero_()
        return target

    def _uploaded(self, source: Tensor, non_blocking: bool) -> None:
        if not self._is_pinned(source):
            self.waited("a copy of pageable memory")
        elif not non_blocking:
            self.waited("a copy from the host")
        self._noted_copy("upload")

    def _noted_copy(self, name: str) -> None:
        if self.capturing is not None:
            self.problem(f"{name} inside capture {self.capturing.number}, at {product_line()}")
        self.launched("copy", name, ())

    def _empty(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return None
        if self.capturing is not None:
            self.problem(
                f"pinned memory is allocated inside capture {self.capturing.number}, "
                f"at {product_line()}"
            )
        fresh = func(*args, **(kwargs | {"pin_memory": False}))
        storage = fresh.untyped_storage()
        self._pinned[storage._cdata] = weakref.ref(storage)
        return fresh

    def _pin(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        fresh = self._empty(
            aten.empty.memory_format,
            [list(args[0].shape)],
            {"dtype": args[0].dtype, "pin_memory": True},
        )
        fresh.copy_(args[0])
        return fresh

    def _is_pinned(self, tensor: Tensor) -> bool:
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and known() is not None

    def _bincount(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Count; on a CUDA device the host reads the smallest and the largest number first."""
        self.waited("bincount, whose result's length depends on the numbers")
        length = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        made = torch.empty(length, dtype=torch.int64, device=META)
        self.allocated(made)
        self.launched("torch", "aten::bincount", [args[0], made])
        return made

    def _nonzero(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Find nothing."""
        if not args[0].is_meta:
            return None
        self.waited("nonzero, whose result's length depends on the numbers")
        made = torch.empty((0, args[0].dim()), dtype=torch.int64, device=META)
        self.allocated(made)
        return made

    def _index(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Take the places of a mask, none."""
        mask = next((x for x in args[1] if x is not None and x.dtype == torch.bool), None)
        if mask is None or not mask.is_meta:
            return None
        self.waited("a mask as index, whose result's length depends on the numbers")
        shape = (0, *args[0].shape[mask.dim() :])
        made = torch.empty(shape, dtype=args[0].dtype, device=META)
        self.allocated(made)
        return made

    def _refuse(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not any(x.is_meta for x in _tensors(args)):
            return None
        self.waited(f"{func.overloadpacket}, whose result depends on numbers of the device")
        raise NotImplementedError(f"{func}: no answer is invented for it")


def _on_meta(value: Any) -> Any:
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples of them."""
    if isinstance(values, Tensor):
        return [values]
    tensors: list[Tensor] = []
    for value in values if isinstance(values, Iterable) else ():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


def _form(value: Any) -> Any:
    """Return what the shape of an operator's result depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)) or not isinstance(value, Hashable):
        return tuple(map(_form, value))
    return type(value), value  # 1 and 1.0 make different dtypes


@cache
def _makes_its_results(func: OpOverload) -> bool:
    """True if an operator writes to no argument, and its results share memory with none."""
    schema = func._schema
    return all(x.alias_info is None for x in (*schema.arguments, *schema.returns))


@cache
def _is_composite(func: OpOverload) -> bool:
    """True if torch computes the operator by calling others."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )
