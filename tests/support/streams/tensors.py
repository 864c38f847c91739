"""CPU tensors that play CUDA's: `Card` for device memory, `Pinned` for pinned host memory.

A `Card` says that it is on cuda:0; `dispatch` computes on the CPU memory behind it. Some of torch's
bindings ask for a CUDA device before a dispatch mode sees the call; `Card` answers those itself.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.streams.checker import Span
from support.streams.host_arrays import HostArray
from support.streams.recorder import Block, Recorder, without_recording

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")


def extent(inner: Tensor) -> tuple[int, int]:
    """Return the first byte and the byte after the last of a tensor in its storage."""
    start, size, count = inner.storage_offset(), inner.itemsize, inner.numel()
    if count == 0 or inner.is_contiguous():
        return start * size, (start + count) * size
    reach = sum((n - 1) * step for n, step in zip(inner.shape, inner.stride(), strict=True))
    return start * size, (start + reach + 1) * size


class Card(Tensor):
    """A tensor in device memory; `inner` is the CPU tensor behind it."""

    inner: Tensor
    block: Block
    span: Span  # fixed, as the views of its memory are

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block) -> "Card":
        card: Card = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        card.inner, card.block = inner, block
        card.span = Span(block.number, *extent(inner))
        return card

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a thread that the recorder does not see")

    # ---- what does not reach the dispatch mode ----

    def __getitem__(self, key: Any) -> Tensor:
        indices = _indices(key)
        if indices is not None:
            return aten.index.Tensor(self, indices)
        with without_recording():
            view = self.inner[key]
        return Card(view, self.block)

    def __setitem__(self, key: Any, value: Any) -> None:
        indices = _indices(key)
        if indices is not None:
            aten.index_put_.default(self, indices, value)
        elif isinstance(value, Tensor):
            self[key].copy_(value)
        else:
            self[key].fill_(value)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        aten.copy_.default(self, other, non_blocking)
        return self

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:
        return aten._to_copy.default(torch.tensor(data, dtype=dtype or self.dtype), device=DEVICE)

    def item(self) -> Any:
        return aten._local_scalar_dense.default(self)

    def tolist(self) -> Any:
        return aten._to_copy.default(self, device=torch.device("cpu")).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def contiguous(self, **options: Any) -> Tensor:
        return aten.contiguous.default(self, **options)

    def nonzero(self) -> Tensor:
        return aten.nonzero.default(self)

    def __invert__(self) -> Tensor:
        return aten.bitwise_not.default(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())


class Pinned(Tensor):
    """Pinned host memory; arrays over it tell the recorder about their accesses."""

    recorder: Recorder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the class for views only; whatever is computed is ordinary memory."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is not Tensor:
                return result
            pinned = next(x for x in args if isinstance(x, Pinned))
            shared = torch._C._is_alias_of(result, pinned)
            return pin_as(result, pinned.recorder) if shared else result

    def numpy(self, *, force: bool = False) -> HostArray:
        return HostArray.over(self.plain().numpy(), self.recorder)

    def spans(self) -> list[Span]:
        plain = self.plain()
        first, last = extent(plain)
        start = plain.data_ptr() - plain.storage_offset() * plain.itemsize
        return self.recorder.pinned(start + first, start + last)

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass(), without_recording():
            return self.as_subclass(Tensor)


def pin_as(memory: Tensor, recorder: Recorder) -> Pinned:
    pinned = memory.as_subclass(Pinned)
    pinned.recorder = recorder
    return pinned


def spans_of(x: Tensor) -> list[Span]:
    """Return the memory of a tensor that the recorder knows."""
    if isinstance(x, Card):
        return [x.span]
    return x.spans() if isinstance(x, Pinned) else []


def _indices(key: Any) -> list[Tensor | None] | None:
    """Return the index tensors of a key that gathers; None for one that makes a view."""
    parts = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(part, (Tensor, np.ndarray, list)) for part in parts):
        return None
    if any(isinstance(part, slice) and part != slice(None) for part in parts):
        raise NotImplementedError(f"slices beside index tensors: {key}")
    return [
        None
        if isinstance(part, slice)
        else part
        if isinstance(part, Tensor)
        else torch.tensor(part)
        for part in parts
    ]
