"""Launches of Triton kernels that cost the host little.

For every launch Triton makes a key of its arguments' types, alignments and values, some tens of
microseconds of Python, to find the compiled code. Here the compile-time arguments are chosen once,
and the code is found by a key of what else can differ. It is finer: where it is equal, and numbers
have the same types, Triton's is equal, too.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from triton import knobs
from triton.runtime import driver

Number: TypeAlias = int | float

ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that are not multiples of it
WORD = 2**31  # from here on Triton passes an integer as int64
address, dtype = Tensor.data_ptr, operator.attrgetter("dtype")

# Triton's function that launches compiled code, its arguments before those of the kernel, and the
# kernel's compile-time arguments, which have a place after the others.
Code: TypeAlias = tuple[Any, tuple[object, ...], tuple[object, ...]]

# Decorates a function that makes the `CachedLaunch` for its arguments. Triton tells True from 1,
# and so does this, but not inside of tuples.
chosen_once = functools.lru_cache(maxsize=None, typed=True)


class CachedLaunch:
    """Launches of one kernel with one choice of compile-time arguments; remembers compiled code.

    `chosen_once` makes one for each choice.

    Args:
        kernel: a function decorated with `triton.jit`, whose arguments are tensors, then numbers,
            then compile-time constants.
        constants: compile-time arguments by name.
        options: num_warps, num_stages and launch_pdl.
        free: how many of its first numbers are in `do_not_specialize`.
        dtypes: which tensors have a dtype of their own. Those of the others follow from these and
            from the constants, which the caller has checked.
    """

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, object],
        options: Mapping[str, int],
        *,
        free: int = 0,
        dtypes: Sequence[int],
    ) -> None:
        self.kernel, self.constants, self.options = kernel, constants, options
        self._fixed = operator.itemgetter(slice(free, None))  # numbers whose values count
        self._fit, self._dtypes = _all_fit(free), _dtypes_at(dtypes)
        self.codes: dict[tuple[object, ...], Code] = {}

    def __call__(
        self, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: tuple[Number, ...]
    ) -> None:
        """Launch on the current stream.

        Unlike Triton, it does not look whether known code is given tensors of the host.

        Args:
            grid: numbers of programs.
            tensors, numbers: arguments, in the kernel's order; tensors are on the current device.
        """
        hooks = knobs.runtime  # by which a profiler hears of Triton's own launches
        if self.codes and not (hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls):
            places, active = [*map(address, tensors)], driver.active
            device = active.get_current_device()
            code = self.codes.get(self.key(places, tensors, numbers, device))
            if code is not None:
                run, first, last = code
                stream = active.get_current_stream(device)
                run(*grid, 1, stream, *first, *places, *numbers, *last)
                return
        compiled = self.by_triton(grid, tensors, numbers)
        if compiled is not None:  # which Triton's interpreter returns
            self._remember(compiled, tensors, numbers)

    def _remember(
        self, compiled: Any, tensors: Sequence[Tensor], numbers: tuple[Number, ...]
    ) -> None:
        places, device = [*map(address, tensors)], driver.active.get_current_device()
        names = self.kernel.arg_names[len(tensors) + len(numbers) :]
        no_hooks = (None, None, None)  # the metadata that they are called with, before, after
        first = (compiled.function, compiled.packed_metadata, *no_hooks)
        last = tuple([self.constants[name] for name in names])
        self.codes[self.key(places, tensors, numbers, device)] = compiled.run, first, last

    def by_triton(
        self, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: tuple[Number, ...]
    ) -> Any:
        """Launch as Triton does, which finds the code itself; return what Triton returns."""
        return self.kernel[grid](*tensors, *numbers, **self.constants, **self.options)

    def key(
        self,
        places: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        device: int,
    ) -> tuple[object, ...]:
        """Return a key that differs wherever Triton's does for the same constants and options.

        Types of numbers are not part of it: an argument must always have the same type. Otherwise
        Triton's launcher converts an integer where the code takes a float, and raises TypeError for
        a float where it takes an integer.
        """
        aligned = functools.reduce(operator.or_, places) % ALIGNMENT == 0
        return (
            device,
            aligned or tuple([place % ALIGNMENT == 0 for place in places]),
            self._fixed(numbers),
            self._dtypes(tensors),
            self._fit(numbers),
        )


# The functions that these return run at every launch, so each is made for its number of parts.


def _dtypes_at(places: Sequence[int]) -> Callable[[Sequence[Tensor]], object]:
    """Return a function that reads the dtypes of the tensors at `places`."""
    if not places:
        return _nothing
    if len(places) == 1:
        return lambda tensors, place=places[0]: tensors[place].dtype  # type: ignore[misc]
    chosen = operator.itemgetter(*places)
    return lambda tensors: tuple(map(dtype, chosen(tensors)))


def _all_fit(free: int) -> Callable[[tuple[Number, ...]], object]:
    """Return a function that tells which of the first `free` numbers fit 32 bits."""
    if free == 0:
        return _nothing
    if free == 1:
        return lambda numbers: -WORD <= numbers[0] < WORD
    return lambda numbers: tuple([-WORD <= one < WORD for one in numbers[:free]])


def _nothing(_: Sequence[object]) -> None:
    """Return the part of a key where nothing can differ."""
