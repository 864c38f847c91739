"""Evaluates a program's operations on integers in NumPy: bounds of loops, page lists, indices.

JAX would dispatch and compile each; a batch has a million of them.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np

MOST_ELEMENTS, MOST_OF_TABLES = 2**21, 4096  # larger arrays are never bounds
Value: TypeAlias = "np.ndarray | None"  # None: not known, because nothing is computed


def known(aval: Any) -> bool:
    """Tell whether values of this type are computed: integers in one dimension, small tables."""
    shape = getattr(aval, "shape", None)
    return shape is not None and _known(tuple(shape), getattr(aval, "dtype", None))


@cache
def _known(shape: tuple[int, ...], dtype: Any) -> bool:
    if not str(dtype).startswith(("int", "uint", "bool")):
        return False
    flat = len(shape) <= 1 or (len(shape) == 2 and min(shape) == 1)
    return math.prod(shape) <= (MOST_ELEMENTS if flat else MOST_OF_TABLES)


def evaluate(name: str, values: list[np.ndarray], params: Mapping[str, Any], aval: Any) -> Value:
    """Return the result of a primitive; None for one that is not in the table."""
    if name in ELEMENTWISE:
        found = ELEMENTWISE[name](*values)
    elif name in SHAPED:
        found = SHAPED[name](values, params)
    else:
        return None
    return np.asarray(found).astype(aval.dtype, copy=False).reshape(aval.shape)


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide towards zero."""
    found: np.ndarray = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
    return found


def _dynamic_slice(values: list[np.ndarray], params: Mapping[str, Any]) -> np.ndarray:
    array, *starts = values
    return array[_window(array.shape, starts, params["slice_sizes"])]


def _dynamic_update_slice(values: list[np.ndarray], params: Mapping[str, Any]) -> np.ndarray:
    array, update, *starts = values
    found = array.copy()
    found[_window(array.shape, starts, update.shape)] = update
    return found


def _window(shape: Any, starts: list[np.ndarray], sizes: Any) -> tuple[slice, ...]:
    firsts = (
        max(0, min(int(start), whole - size))
        for whole, start, size in zip(shape, starts, sizes, strict=True)
    )
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _broadcast(values: list[np.ndarray], params: Mapping[str, Any]) -> np.ndarray:
    (array,) = values
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], np.shape(array), strict=True):
        shape[dim] = size
    return np.broadcast_to(np.reshape(array, shape), params["shape"])


def _iota(values: list[np.ndarray], params: Mapping[str, Any]) -> np.ndarray:
    shape, dim = params["shape"], params["dimension"]
    line = np.arange(shape[dim]).reshape([-1 if at == dim else 1 for at in range(len(shape))])
    return np.broadcast_to(line, shape)


def _slice(values: list[np.ndarray], params: Mapping[str, Any]) -> np.ndarray:
    strides = params["strides"] or (1,) * values[0].ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return values[0][tuple(slice(*bound) for bound in bounds)]


def _reduced(by: Any) -> Callable[[list[np.ndarray], Mapping[str, Any]], np.ndarray]:
    def reduce(values: list[np.ndarray], params: Mapping[str, Any]) -> np.ndarray:
        found: np.ndarray = by.reduce(values[0], axis=tuple(params["axes"]))
        return found

    return reduce


def _cumulated(by: Any) -> Callable[[list[np.ndarray], Mapping[str, Any]], np.ndarray]:
    def cumulate(values: list[np.ndarray], params: Mapping[str, Any]) -> np.ndarray:
        axis = params["axis"]
        array = np.flip(values[0], axis) if params["reverse"] else values[0]
        found: np.ndarray = by.accumulate(array, axis=axis)
        return np.flip(found, axis) if params["reverse"] else found

    return cumulate


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divided,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sign": np.sign,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": lambda a: ~a,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": np.right_shift,  # of numbers that are not negative
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "clamp": lambda low, a, high: np.clip(a, low, high),
    "select_n": lambda which, *cases: np.choose(which.astype(np.intp), cases),
    "convert_element_type": lambda a: a,
    "copy": lambda a: a,
    "optimization_barrier": lambda a: a,
    "multiple_of": lambda a: a,
}
SHAPED: dict[str, Callable[[list[np.ndarray], Mapping[str, Any]], Any]] = {
    "reshape": lambda values, params: values[0],
    "squeeze": lambda values, params: values[0],
    "expand_dims": lambda values, params: values[0],
    "transpose": lambda values, params: values[0].transpose(params["permutation"]),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "concatenate": lambda values, params: np.concatenate(values, params["dimension"]),
    "stack": lambda values, params: np.stack(
        values, params.get("axis", params.get("dimension", 0))
    ),
    "reduce_max": _reduced(np.maximum),
    "reduce_min": _reduced(np.minimum),
    "reduce_sum": _reduced(np.add),
    "reduce_and": _reduced(np.logical_and),
    "reduce_or": _reduced(np.logical_or),
    "cumsum": _cumulated(np.add),
    "cummax": _cumulated(np.maximum),
    "cummin": _cumulated(np.minimum),
}
