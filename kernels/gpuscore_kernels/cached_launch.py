"""Launches of Triton kernels that cost the host little.

For every launch Triton makes a key of its arguments' types, alignments and values, some tens of
microseconds of Python, to find the compiled code. Here the code is found by a key that takes a few
microseconds to make. It is finer: where it is equal, Triton's is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Number: TypeAlias = int | float
Key: TypeAlias = tuple[object, ...]

ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that are not multiples of it
WORD = 2**31  # from here on Triton passes an integer as int64


class CachedLaunch:
    """The compiled code of one kernel, as far as it was launched; for one place in the source.

    Args:
        kernel: a function decorated with `triton.jit`, whose arguments are tensors, then numbers,
            then compile-time constants.
        free: how many of its first numbers are in `do_not_specialize`.
    """

    def __init__(self, kernel: Any, free: int = 0) -> None:
        self.kernel, self._free = kernel, free
        self._compiles = isinstance(kernel, JITFunction)  # False in Triton's interpreter
        # By key: what launches the code, its handle and metadata, and the compile-time arguments.
        self._codes: dict[Key, tuple[Any, object, object, tuple[object, ...]]] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: numbers of programs.
            tensors, numbers: arguments, in the kernel's order.
            constants: compile-time arguments by name, always in the same order.
            options: num_warps and num_stages, always in the same order.
        """
        if not self._compiles or _has_hooks():
            self.kernel[grid](*tensors, *numbers, **constants, **options)
            return
        places = addresses(tensors)
        device = driver.active.get_current_device()
        key = self.key(places, tensors, numbers, constants, options, device)
        code = self._codes.get(key)
        if code is None:
            compiled = self.kernel[grid](*tensors, *numbers, **constants, **options)
            names = self.kernel.arg_names[len(tensors) + len(numbers) :]
            rest = tuple(constants[name] for name in names)
            code = compiled.run, compiled.function, compiled.packed_metadata, rest
            self._codes[key] = code
            return
        run, function, metadata, rest = code
        stream = driver.active.get_current_stream(device)
        run(*grid, 1, stream, function, metadata, None, None, None, *places, *numbers, *rest)

    def key(
        self,
        places: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        constants: Mapping[str, object],
        options: Mapping[str, int],
        device: int,
    ) -> Key:
        """Return a key that differs wherever Triton's does.

        Numbers of two types may be equal, which Triton tells apart, so types are part of it.
        """
        union = 0
        for place in places:
            union |= place
        aligned: object = union % ALIGNMENT == 0
        if not aligned:
            aligned = tuple([place % ALIGNMENT == 0 for place in places])
        free = self._free
        return (
            device,
            aligned,
            tuple([tensor.dtype for tensor in tensors]),
            tuple([tensor.is_cuda for tensor in tensors]),
            numbers[free:],
            tuple(map(type, numbers)),
            tuple([-WORD <= number < WORD for number in numbers[:free]]),
            tuple(constants.values()),
            tuple(map(type, constants.values())),
            tuple(options.values()),
        )


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the address of each tensor's first element."""
    return [tensor.data_ptr() for tensor in tensors]


def _has_hooks() -> bool:
    """True if a profiler wants to hear of launches, which Triton's own launch tells it."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
