"""Memory of a Pallas kernel: contents of small integer arrays, only shapes of others."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_code.integers import Value, known


@dataclass
class Memory:
    """A kernel's reference. Contents are None where they are not known."""

    value: Value

    @classmethod
    def empty(cls, aval: Any) -> "Memory":
        """Return scratch memory; integers that were not written are as good as zero."""
        inner = getattr(aval, "inner_aval", aval)
        return cls(np.zeros(inner.shape, inner.dtype) if known(inner) else None)


def read(eqn: Any, inputs: list[Any]) -> Value:
    memory, *indices = inputs
    place = _place(eqn, indices)
    aval = eqn.outvars[0].aval
    if memory.value is None or place is None or not known(aval):
        return None
    return np.asarray(memory.value[place]).reshape(aval.shape)


def write(eqn: Any, inputs: list[Any]) -> Value:
    """Write; return what was there."""
    memory, new, *indices = inputs
    if memory.value is None:
        return None
    place = _place(eqn, indices)
    if place is None or not isinstance(new, np.ndarray | np.generic):
        memory.value = None
        return None
    before = np.asarray(memory.value[place]).copy()
    memory.value = memory.value.copy()
    memory.value[place] = np.asarray(new).reshape(before.shape)
    return before


def _place(eqn: Any, indices: list[Any]) -> tuple[Any, ...] | None:
    """Return an index for NumPy; None if a part of it is not known."""
    if any(one is None for one in indices):
        return None
    transforms = eqn.params["tree"].unflatten(indices)
    place: tuple[Any, ...] = ()
    for transform in transforms:
        if place or not hasattr(transform, "indices"):
            return None  # a view of a view: no kernel takes bounds through one
        place = tuple(_along(one) for one in transform.indices)
    return place or (Ellipsis,)


def _along(index: Any) -> Any:
    if hasattr(index, "start"):
        first = int(index.start)
        return slice(first, first + index.size * index.stride, index.stride)
    return int(index) if np.ndim(index) == 0 else np.asarray(index)
