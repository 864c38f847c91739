"""Launches of Triton kernels that cost the host little.

At every launch Triton finds the compiled code by a key of all arguments' types, alignments and
values, which takes some tens of microseconds of Python. Here the compile-time arguments are chosen
once, and a smaller key has only what else can differ. Two launches with the same key, and numbers
of the same types, would have the same key in Triton, too. A launch that differs from the latest one
in addresses only needs no key. Code that was found is launched by Triton's function in C.
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

from gpuscore_kernels.launch import row_warps

Number: TypeAlias = int | float

ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that are not multiples of it
WORD = 2**31  # from here on Triton passes an integer as int64
address = Tensor.data_ptr
dtype = operator.attrgetter("dtype")

# The function in C that launches compiled code, its arguments between the stream and the kernel's
# arguments, whether it takes the latter as one tuple, and the kernel's compile-time arguments,
# which have a place after the others.
Code: TypeAlias = tuple[Callable[..., None], tuple[object, ...], bool, tuple[object, ...]]

# Decorates a function that makes the `CachedLaunch` for its arguments. Triton tells True from 1,
# and so does this, but not inside of tuples.
chosen_once = functools.lru_cache(maxsize=None, typed=True)

_NEVER = None, None, None, None, ()  # instead of the latest launch; numbers are never None


class CachedLaunch:
    """Launches of one kernel with one choice of compile-time arguments; remembers compiled code.

    `chosen_once` makes one for each choice.

    Args:
        kernel: a function decorated with `triton.jit`, whose arguments are tensors, then numbers,
            then compile-time constants.
        constants: compile-time arguments by name.
        options: num_warps and num_stages.
        free: how many of its first numbers are in `do_not_specialize`: 0 or 1.
        dtypes: the tensors that have a dtype of their own. The other tensors' dtypes follow from
            these and from the constants, which the caller has checked.
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
        self.kernel = kernel
        self.constants = constants
        self.options = options
        self._fixed = operator.itemgetter(slice(free, None))  # numbers whose values count
        self._fit = _fits(free)
        self._dtypes = _dtypes_at(dtypes)
        self.codes: dict[tuple[object, ...], Code] = {}
        self._latest: tuple[Any, ...] = _NEVER
        self._driver: Any = None  # Triton's, once it has compiled

    def __call__(
        self, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: tuple[Number, ...]
    ) -> None:
        """Launch on the current stream.

        Unlike Triton, it does not look whether known code is given tensors of the host.

        Args:
            grid: numbers of programs.
            tensors, numbers: arguments, in the kernel's order; tensors are on the current device.
        """
        places = [*map(address, tensors)]
        runtime = knobs.runtime
        active = self._driver
        # A profiler hears of Triton's own launches by these hooks.
        if active is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            self._by_triton(grid, places, tensors, numbers)
            return
        device = active.get_current_device()
        # Layers of a pass differ in their addresses only. So the key is not made again.
        before, dtypes, its_device, code, tail = self._latest
        if (
            numbers != before
            or gcd(ALIGNMENT, *places) != ALIGNMENT
            or self._dtypes(tensors) != dtypes
            or device != its_device
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

    def forget(self) -> None:
        """Drop all code, such as another device's."""
        self.codes.clear()
        self._latest = _NEVER
        self._driver = None

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
        run, first, nested = in_c(compiled.run, compiled.function, compiled.packed_metadata)
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


def row_launch(
    kernel: Any, constants: Mapping[str, int], dtypes: Sequence[int] = (0,)
) -> CachedLaunch:
    """Return the launch of a kernel whose programs hold "BLOCK" elements of a row each.

    `dtypes` are as in `CachedLaunch`.
    """
    options = {"num_warps": row_warps(constants["BLOCK"])}
    return CachedLaunch(kernel, constants, options, dtypes=dtypes)


def in_c(
    launcher: Any, function: int, metadata: object
) -> tuple[Callable[..., None], tuple[object, ...], bool]:
    """Return the function in C behind a launcher of Triton's, and how to call it.

    A launcher adds what it knows of the code to its arguments, each version of Triton in an order
    of its own. So it is called once with a function in place of that in C, which notes them.

    Returns:
        The function, its arguments between the stream and the kernel's, and whether it takes the
        kernel's as one tuple. This is the launcher itself if it does more than to call the
        function: it allocates memory for code that needs some, or it is not Triton's.

    Raises:
        RuntimeError: the arguments have an unknown order.
    """
    first = (function, metadata, None, None, None)  # no metadata for hooks, and no hooks
    sizes = [getattr(launcher, f"{name}_scratch_size", None) for name in ("global", "profile")]
    if sizes != [0, 0]:
        return launcher, first, False
    noted: list[tuple[object, ...]] = []
    twin = copy.copy(launcher)
    twin.launch = lambda *arguments: noted.append(arguments)
    where = (1, 1, 1, 0)
    argument = object()
    twin(*where, *first, argument)
    (arguments,) = noted
    nested = arguments[-1] == (argument,)
    if arguments[:4] != where or not (nested or arguments[-1] is argument):
        raise RuntimeError(f"Triton's launcher calls its function in C with {arguments}")
    return launcher.launch, arguments[4:-1], nested


# The functions that these return run at every launch, so each is made for its number of parts.


def _dtypes_at(places: Sequence[int]) -> Callable[[Sequence[Tensor]], object]:
    """Return a function that reads the dtypes of the tensors at `places`."""
    if not places:
        return _nothing
    if len(places) == 1:
        return lambda tensors, place=places[0]: tensors[place].dtype  # type: ignore[misc]
    chosen = operator.itemgetter(*places)
    return lambda tensors: tuple(map(dtype, chosen(tensors)))


def _fits(free: int) -> Callable[[tuple[Number, ...]], object]:
    """Return a function that tells whether the first number, if it is `free`, fits 32 bits."""
    return (lambda numbers: -WORD <= numbers[0] < WORD) if free else _nothing


def _nothing(_: Sequence[object]) -> None:
    """Return the part of a key where nothing can differ."""
