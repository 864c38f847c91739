"""Triton's interpreter without work that it repeats at every operation of a kernel, and with
products that are rounded alike wherever a row lies.

What is kept here depends on its arguments alone, and nothing changes it afterwards. Apart from
products, the values of a kernel's tensors are computed as always.
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import numpy as np
import pytest


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Have the interpreter patch Triton's language once, make each type once, and leave out what
    changes no value."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch.setattr(interpreter, "_patch_lang", _patching_once(interpreter))
    patch.setattr(core, "_type_for_tuple_values", _once(core._type_for_tuple_values, _of_values))
    patch.setattr(interpreter, "_get_np_dtype", _once(interpreter._get_np_dtype, _of_type))
    patch.setattr(core.block_type, "__init__", _filled_once(core.block_type.__init__, _of_block))
    patch.setattr(core.tensor, "__init__", _tensor_of_kept_shape(core))
    # Each sum of integers is computed twice more for an assertion that only debugging looks at.
    assert not interpreter.InterpreterOptions.debug
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
    operands = TritonSemantic.binary_op_type_checking_impl
    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", _unless_alike(core, operands))
    shapes = TritonSemantic.broadcast_impl_value
    patch.setattr(TritonSemantic, "broadcast_impl_value", _to_kept_shapes(interpreter, shapes))


def steady_products(patch: pytest.MonkeyPatch) -> None:
    """Sum products of float32 in float64 and round them once; factors are in TF32 where the kernel
    says so, or in two parts in TF32.

    The interpreter leaves them to NumPy, whose library sums a row in an order that depends on its
    place in the matrix, on some processors. Tensor cores do not.
    """
    from triton._C.libtriton.ir import INPUT_PRECISION
    from triton.runtime import interpreter

    builder, wide = interpreter.InterpreterBuilder, np.float64
    product = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *options: Any) -> Any:
        if not a.data.dtype == b.data.dtype == np.float32:
            return product(self, a, b, d, precision, *options)
        if precision == INPUT_PRECISION.IEEE:
            exact = np.matmul(a.data, b.data, dtype=wide)
        else:
            left, right = in_tf32(a.data), in_tf32(b.data)
            exact = np.matmul(left, right, dtype=wide)
            if precision == INPUT_PRECISION.TF32x3:
                exact += np.matmul(left, in_tf32(b.data - right), dtype=wide)
                exact += np.matmul(in_tf32(a.data - left), right, dtype=wide)
        return interpreter.TensorHandle(exact.astype(np.float32) + d.data, d.dtype.scalar)

    patch.setattr(builder, "create_dot", create_dot)


def in_tf32(x: np.ndarray) -> np.ndarray:
    """Cut the numbers' last 13 of 23 bits off."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def _patching_once(interpreter: Any) -> Callable[[Any], Any]:
    """Keep Triton's language as the interpreter patches it.

    It would patch some hundred functions again at every call of a function within a kernel, which
    takes longer than the function.
    """
    from triton import language

    patch_language, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        used = set(map(id, function.__globals__.values()))
        known = used & {id(language), id(language.core)}
        if (key := frozenset(known)) not in patched:
            patched.add(key)
            patch_language(function)
        return interpreter._LangPatchScope()  # which restores nothing

    return patch_once


def _unless_alike(core: Any, adjust: Callable[..., Any]) -> Callable[..., Any]:
    """Return `adjust`, which gives two operands one type, without work for those that have one."""

    def adjusted(
        self: Any,
        left: Any,
        right: Any,
        allow_left_pointer: bool = False,
        allow_right_pointer: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if (
            isinstance(left, core.tensor)
            and isinstance(right, core.tensor)
            and not div_or_mod
            and _of_type(left.type) == _of_type(right.type)
            and not left.dtype.is_ptr()
        ):
            return left, right
        options = allow_left_pointer, allow_right_pointer, arithmetic_check, div_or_mod
        return adjust(self, left, right, *options)

    return adjusted


def _to_kept_shapes(interpreter: Any, broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return `broadcast`, which gives two operands one shape, with types from an earlier call."""
    known: dict[Hashable, list[tuple[Any, tuple[int, ...]]]] = {}

    def looked_up(self: Any, left: Any, right: Any) -> Any:
        key = _of_type(left.type), _of_type(right.type)
        if key not in known:
            made = broadcast(self, left, right)
            known[key] = [(x.type, tuple(int(n) for n in x.shape)) for x in made]
            return made
        return tuple(
            x if of == _of_type(kind) else self.tensor(spread(x.handle, shape), kind)
            for x, of, (kind, shape) in zip((left, right), key, known[key], strict=True)
        )

    def spread(handle: Any, shape: tuple[int, ...]) -> Any:
        return interpreter.TensorHandle(np.broadcast_to(handle.data, shape), handle.dtype.scalar)

    return looked_up


def _once(compute: Callable[..., Any], key_of: Callable[..., Hashable]) -> Callable[..., Any]:
    """Return `compute` with a cache; what has no key (None) is computed each time."""
    known: dict[Hashable, Any] = {}

    @wraps(compute)
    def looked_up(*arguments: Any) -> Any:
        if (key := key_of(*arguments)) is None:
            return compute(*arguments)
        if key not in known:
            known[key] = compute(*arguments)
        return known[key]

    return looked_up


def _filled_once(fill: Callable[..., None], key_of: Callable[..., Hashable]) -> Callable[..., None]:
    """Return a constructor that copies the attributes which an equal object was given."""
    known: dict[Hashable, dict[str, Any]] = {}

    def construct(self: Any, *arguments: Any) -> None:
        key = key_of(*arguments)
        if key not in known:
            fill(self, *arguments)
            known[key] = dict(vars(self))
        else:
            vars(self).update(known[key])

    return construct


def _tensor_of_kept_shape(core: Any) -> Callable[..., None]:
    """Return the constructor of a tensor, whose shape and size come from an earlier one of its
    type."""
    fill, known = core.tensor.__init__, {}

    def construct(self: Any, handle: Any, type: Any) -> None:
        key = _of_type(type)
        if key not in known:
            fill(self, handle, type)
            known[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[key]

    return construct


def _of_values(values: list[Any], fields: Any = None) -> Hashable:
    """Return a key of sizes, which are numbers or constants of Triton; None of everything else."""
    plain = tuple((type(value), getattr(value, "value", value)) for value in values)
    return plain if fields is None and all(type(size) is int for _, size in plain) else None


def _of_type(type_: Any) -> Hashable:
    return type(type_), type_.name


def _of_block(element: Any, shape: Any) -> Hashable:
    sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "values", shape))
    return _of_type(element), sizes
