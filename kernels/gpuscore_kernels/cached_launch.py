"""Launches Triton kernels with less host time than Triton's own launch.

At every launch Triton looks up the compiled code by a key of all arguments' types, alignments and
values. That takes tens of microseconds of Python. A `CachedLaunch` fixes the compile-time
arguments, so its key holds only the arguments that can still differ. If two launches have equal
keys here, and numbers of the same types, their keys in Triton are equal, too. If only addresses
differ from the latest launch, no key is made at all. Triton's C function then launches the code.
"""

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, TypeAlias

from torch import Tensor
from triton import knobs
from triton.runtime import driver

Number: TypeAlias = int | float

ALIGNMENT = 16  # bytes; Triton compiles separate code for pointers that are not multiples of it
WORD = 2**31  # Triton passes an integer of this size or more as int64
address = Tensor.data_ptr
dtype = operator.attrgetter("dtype")

# What it takes to launch compiled code:
# - the C function,
# - the arguments that it takes after the stream and before the kernel's arguments,
# - whether it takes the kernel's arguments as one tuple,
# - the compile-time arguments, which are the kernel's last ones.
Code: TypeAlias = tuple[Callable[..., None], tuple[object, ...], bool, tuple[object, ...]]

# Decorates a function that makes a `CachedLaunch`: it then runs once for each choice of arguments.
# True and 1 are different arguments, as in Triton, except inside a tuple.
chosen_once = functools.lru_cache(maxsize=None, typed=True)

# `_latest` before the first launch. It never matches, because numbers are never None.
_NEVER = None, None, None, None, ()


class CachedLaunch:
    """Launches one kernel with one choice of compile-time arguments, and remembers compiled code.

    Create it in a function that `chosen_once` decorates, so that each choice has one object.

    Args:
        kernel: a function decorated with `triton.jit`, whose arguments are tensors, then numbers,
            then compile-time constants.
        constants: compile-time arguments by name.
        options: num_warps and num_stages.
        unspecialized: 1 if the first number is in the kernel's `do_not_specialize`, else 0.
        dtypes: indices of the tensors whose dtypes are part of the key. The caller has checked
            that these and the constants decide the other tensors' dtypes.
    """

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, object],
        options: Mapping[str, int],
        *,
        unspecialized: int = 0,
        dtypes: Sequence[int],
    ) -> None:
        self.kernel = kernel
        self.constants = constants
        self.options = options
        # Triton compiles separate code for some values of these numbers.
        self._specialized = operator.itemgetter(slice(unspecialized, None))
        # Whether the unspecialized number, if any, fits 32 bits.
        self._fit = (lambda numbers: -WORD <= numbers[0] < WORD) if unspecialized else _nothing
        self._dtypes = _dtypes_at(dtypes)
        self.codes: dict[tuple[object, ...], Code] = {}
        self._latest: tuple[Any, ...] = _NEVER
        self._driver: Any = None  # Triton's driver, known once it has compiled

    def __call__(
        self, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: tuple[Number, ...]
    ) -> None:
        """Launch on the current stream.

        Unlike Triton, a launch of known code does not check that its tensors are on the device.

        Args:
            grid: numbers of programs.
            tensors, numbers: arguments in the kernel's order. Tensors are on the current device.
        """
        places = [*map(address, tensors)]
        runtime = knobs.runtime
        active = self._driver
        # A profiler sets these hooks to observe Triton's own launches.
        if active is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            self._by_triton(grid, places, tensors, numbers)
            return
        device = active.get_current_device()
        # Launches for the layers of one pass differ only in addresses, so they need no new key.
        last_numbers, last_dtypes, last_device, code, tail = self._latest
        if (
            numbers != last_numbers
            or gcd(ALIGNMENT, *places) != ALIGNMENT
            or self._dtypes(tensors) != last_dtypes
            or device != last_device
        ):
            code = self.codes.get(self.key(places, tensors, numbers, device))
            if code is None:
                self._by_triton(grid, places, tensors, numbers)
                return
            tail = (*numbers, *code[3])
            if gcd(ALIGNMENT, *places) == ALIGNMENT:
                self._latest = numbers, self._dtypes(tensors), device, code, tail
        run, first, nested, _ = code
        stream = active.get_current_stream(device)
        if nested:
            run(*grid, 1, stream, *first, (*places, *tail))
        else:
            run(*grid, 1, stream, *first, *places, *tail)

    def _by_triton(
        self,
        grid: tuple[int, int],
        places: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
    ) -> None:
        compiled = self.kernel[grid](*tensors, *numbers, **self.constants, **self.options)
        if compiled is None:  # from Triton's interpreter
            return
        names = self.kernel.arg_names[len(tensors) + len(numbers) :]
        last = tuple([self.constants[name] for name in names])
        run, first, nested = c_function(compiled.run, compiled.function, compiled.packed_metadata)
        self._driver = driver.active
        key = self.key(places, tensors, numbers, self._driver.get_current_device())
        self.codes[key] = run, first, nested, last

    def key(
        self,
        places: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: tuple[Number, ...],
        device: int,
    ) -> tuple[object, ...]:
        """Return a key that differs whenever Triton's key would.

        The key does not hold the types of numbers, so callers must pass each number as one type.
        Otherwise Triton's launcher converts an integer to the float that the code takes, and raises
        TypeError for a float in place of an integer.
        """
        aligned = functools.reduce(operator.or_, places) % ALIGNMENT == 0
        return (
            device,
            aligned or tuple([place % ALIGNMENT == 0 for place in places]),
            self._specialized(numbers),
            self._dtypes(tensors),
            self._fit(numbers),
        )


def row_launch(
    kernel: Any, constants: Mapping[str, int], dtypes: Sequence[int] = (0,)
) -> CachedLaunch:
    """Return the launch of a kernel in which each program holds "BLOCK" elements of a row, 8 to 64
    in a thread.

    `dtypes` are as in `CachedLaunch`.
    """
    options = {"num_warps": min(16, max(1, constants["BLOCK"] // 256))}
    return CachedLaunch(kernel, constants, options, dtypes=dtypes)


def c_function(
    launcher: Any, function: int, metadata: object
) -> tuple[Callable[..., None], tuple[object, ...], bool]:
    """Return the C function that a Triton launcher calls, and how to call it directly.

    A launcher adds arguments of its own, in an order that depends on Triton's version. To learn
    them, this calls a copy of the launcher in which a Python function replaces the C function and
    records its arguments.

    Returns:
        The first three values of `Code`. The function is the launcher itself if that does more than
        call the C function: because it allocates scratch memory, or because it is not Triton's.

    Raises:
        RuntimeError: the arguments have an unknown order.
    """
    first = (function, metadata, None, None, None)  # no metadata for hooks, and no hooks
    sizes = [getattr(launcher, f"{name}_scratch_size", None) for name in ("global", "profile")]
    if sizes != [0, 0]:
        return launcher, first, False
    recorded: list[tuple[object, ...]] = []
    launcher_copy = copy.copy(launcher)
    launcher_copy.launch = lambda *arguments: recorded.append(arguments)
    grid_and_stream = (1, 1, 1, 0)
    argument = object()
    launcher_copy(*grid_and_stream, *first, argument)
    (arguments,) = recorded
    nested = arguments[-1] == (argument,)
    if arguments[:4] != grid_and_stream or not (nested or arguments[-1] is argument):
        raise RuntimeError(f"Triton's launcher calls its function in C with {arguments}")
    return launcher.launch, arguments[4:-1], nested


# `_dtypes_at` returns a function that runs at every launch, so it returns the fastest one.


def _dtypes_at(places: Sequence[int]) -> Callable[[Sequence[Tensor]], object]:
    """Return a function that reads the dtypes of the tensors at `places`."""
    if not places:
        return _nothing
    if len(places) == 1:
        return lambda tensors, place=places[0]: tensors[place].dtype  # type: ignore[misc]
    chosen = operator.itemgetter(*places)
    return lambda tensors: tuple(map(dtype, chosen(tensors)))


def _nothing(_: Sequence[object]) -> None:
    """Return None: this part of the key is the same for all launches of the kernel."""
