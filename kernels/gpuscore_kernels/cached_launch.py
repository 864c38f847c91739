"""Launches of Triton kernels that cost the host little.

For every launch Triton makes a key of its arguments' types, alignments and values, some tens of
microseconds of Python, to find the compiled code. Here the code is found by a key that takes a few
microseconds to make. It is finer: where it is equal, Triton's is.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from triton import knobs
from triton.runtime import driver

Number: TypeAlias = int | float

ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that are not multiples of it
WORD = 2**31  # from here on Triton passes an integer as int64
address, dtype = Tensor.data_ptr, operator.attrgetter("dtype")


class _Code:
    """Compiled code, once there is some, and how it is launched."""

    __slots__ = ("function", "metadata", "rest", "run")

    def __init__(self, *key: object) -> None:
        self.run: Any = None  # Triton's function that launches it
        self.function: object = None
        self.metadata: object = None
        self.rest: tuple[object, ...] = ()  # compile-time arguments, which have a place as well


class CachedLaunch:
    """Launches of one kernel from one place in the source, which remember its compiled code.

    Args:
        kernel: a function decorated with `triton.jit`, whose arguments are tensors, then numbers,
            then compile-time constants.
        free: how many of its first numbers are in `do_not_specialize`.
    """

    def __init__(self, kernel: Any, free: int = 0) -> None:
        self.kernel, self._free = kernel, free
        self._started = False  # True once there is code to remember
        # The code for a key. Typed, because Triton tells numbers apart that Python finds equal.
        self.codes = functools.lru_cache(maxsize=None, typed=True)(_Code)

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """Launch on the current stream.

        Unlike Triton, it does not look whether known code is given tensors of the host.

        Args:
            grid: numbers of programs.
            tensors, numbers: arguments, in the kernel's order; tensors are on the current device.
            constants: compile-time arguments by name, always in the same order.
            options: num_warps and num_stages, always in the same order.
        """
        hooks = knobs.runtime  # by which a profiler hears of Triton's own launches
        if self._started and not (hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls):
            places, active = [*map(address, tensors)], driver.active
            device = active.get_current_device()
            code = self.codes(*self.key(places, tensors, numbers, constants, options, device))
            if code.run is not None:
                stream = active.get_current_stream(device)
                code.run(
                    *grid, 1, stream, code.function, code.metadata, None, None, None,
                    *places, *numbers, *code.rest,
                )  # fmt: skip
                return
        compiled = self.by_triton(grid, tensors, numbers, constants, **options)
        if compiled is not None:  # which Triton's interpreter returns
            self._remember(compiled, tensors, numbers, constants, options)

    def _remember(
        self,
        compiled: Any,
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        constants: Mapping[str, object],
        options: Mapping[str, int],
    ) -> None:
        places, device = [*map(address, tensors)], driver.active.get_current_device()
        code = self.codes(*self.key(places, tensors, numbers, constants, options, device))
        names = self.kernel.arg_names[len(tensors) + len(numbers) :]
        code.rest = tuple([constants[name] for name in names])
        code.function, code.metadata = compiled.function, compiled.packed_metadata
        code.run = compiled.run
        self._started = True

    def by_triton(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        constants: Mapping[str, object],
        **options: int,
    ) -> Any:
        """Launch as Triton does, which finds the code itself; return what Triton returns."""
        return self.kernel[grid](*tensors, *numbers, **constants, **options)

    def key(
        self,
        places: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        constants: Mapping[str, object],
        options: Mapping[str, int],
        device: int,
    ) -> tuple[object, ...]:
        """Return a key that differs, in values or their types, wherever Triton's does."""
        aligned: object = functools.reduce(operator.or_, places) % ALIGNMENT == 0
        if not aligned:
            aligned = tuple([place % ALIGNMENT == 0 for place in places])
        free = [(type(one), -WORD <= one < WORD) for one in numbers[: self._free]]
        return (
            device,
            aligned,
            *map(dtype, tensors),
            *numbers[self._free :],
            *free,
            *constants.values(),
            *options.values(),
        )
