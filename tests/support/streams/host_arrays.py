"""NumPy arrays over pinned memory that tell the recorder what is read and written."""

from typing import Any, Protocol

import numpy as np

from support.streams.checker import Span


class HostAccesses(Protocol):
    """The part of a recorder that arrays need."""

    def pinned(self, start: int, end: int) -> list[Span]: ...

    def host(self, name: str, reads: list[Span], writes: list[Span]) -> None: ...


class HostArray(np.ndarray[Any, Any]):
    """An array over pinned memory, or a view of one.

    Whatever computes from it returns plain arrays.
    """

    accesses: HostAccesses | None = None

    @classmethod
    def over(cls, array: np.ndarray[Any, Any], accesses: HostAccesses) -> "HostArray":
        view = array.view(cls)
        view.accesses = accesses
        return view

    def __array_finalize__(self, parent: Any) -> None:
        self.accesses = getattr(parent, "accesses", None)

    def plain(self) -> np.ndarray[Any, Any]:
        return self.view(np.ndarray)

    def record(self, name: str, *, write: bool) -> None:
        if self.accesses is not None and self.size:
            spans = self.accesses.pinned(*byte_range(self.plain()))
            self.accesses.host(name, [] if write else spans, spans if write else [])

    def __getitem__(self, key: Any) -> Any:
        part = self.plain()[key]
        if isinstance(part, np.ndarray) and np.may_share_memory(part, self.plain()):
            return HostArray.over(part, self.accesses) if self.accesses is not None else part
        self.record("read", write=False)
        return part

    def __setitem__(self, key: Any, value: Any) -> None:
        plain, target = _plain(value), self.plain()[key]
        if not isinstance(target, np.ndarray) or not np.may_share_memory(target, self.plain()):
            self.record("write", write=True)  # one element, or scattered ones
        elif self.accesses is not None:
            HostArray.over(target, self.accesses).record("write", write=True)
        self.plain()[key] = plain

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        outs = options.get("out", ())
        plain = [_plain(array) for array in inputs]
        for array in outs:
            if isinstance(array, HostArray):
                array.record("write", write=True)
        if outs:
            options["out"] = tuple(np.asarray(array) for array in outs)
        result = getattr(ufunc, method)(*plain, **options)
        return outs[0] if len(outs) == 1 else result

    def __iter__(self) -> Any:
        self.record("read", write=False)
        return iter(self.plain())


def byte_range(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the address of an array's first byte, and that after its last; it has elements."""
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    address = array.__array_interface__["data"][0]
    first = address + sum(step for step in steps if step < 0)
    return first, address + sum(step for step in steps if step > 0) + array.itemsize


def _plain(value: Any) -> Any:
    if isinstance(value, HostArray):
        value.record("read", write=False)
        return value.plain()
    return value


def _reading(name: str) -> Any:
    def method(self: HostArray, *args: Any, **options: Any) -> Any:
        self.record(name, write=False)
        return getattr(self.plain(), name)(*args, **options)

    return method


def _writing(name: str) -> Any:
    def method(self: HostArray, *args: Any, **options: Any) -> Any:
        self.record(name, write=True)
        return getattr(self.plain(), name)(*args, **options)

    return method


for _name in ("copy", "astype", "tolist", "item", "tobytes", "take", "repeat", "nonzero"):
    setattr(HostArray, _name, _reading(_name))
for _name in ("sum", "any", "all", "min", "max", "argmin", "argmax", "mean", "cumsum", "dot"):
    setattr(HostArray, _name, _reading(_name))
for _name in ("fill", "sort", "partition", "put"):
    setattr(HostArray, _name, _writing(_name))
