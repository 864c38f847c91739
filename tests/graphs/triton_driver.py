"""A driver for Triton that launches nothing.

Triton computes its specialisation key, and compiles for the device's architecture, as on the
device; only the launch is left out. Its keys depend on the addresses of pointers, so tensors are
handed to it as `Argument`s with the addresses of a `DeviceHeap`, offsets included.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import cache, driver
from triton.runtime.jit import JITFunction, compute_cache_key

from gpuscore_kernels import cached_launch
from gpuscore_kernels.cached_launch import CachedLaunch
from graphs.recorder import Recorder
from support.product_frames import product_line

MOST_THREADS = 1024


class Argument:
    """A tensor as Triton sees it: a dtype and an address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address


@dataclass(slots=True)
class Compiled:
    """A kernel that Triton compiled for one specialisation key."""

    name: str
    key: str
    where: str  # the product's line that launched it first
    ttir: str
    # By the argument's name: the most elements of tensors, and the largest integers.
    elements: dict[str, int] = field(default_factory=dict)
    integers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class TritonLog:
    """Kernels that Triton compiled, in order. Once `frozen` is set, a new one is a problem.

    Attributes:
        tensors: arguments of the present launch.
        remembered: launches for which the product knew the compiled code.
        launched: Triton's key of the code that was launched last.
    """

    compiled: dict[tuple[str, str], Compiled] = field(default_factory=dict)
    frozen: bool = False
    tensors: Sequence[Tensor] = ()
    remembered: int = 0
    launched: str = ""


class _Launcher:
    """Stands for Triton's launcher of one compiled kernel; notes the launch."""

    def __init__(self, recorder: Recorder, log: TritonLog, source: Any) -> None:
        self._recorder, self._log, self._name = recorder, log, source.fn.__name__
        self.key = ""  # Triton's, of the code that it launches

    def __call__(self, *arguments: Any) -> None:
        used = [x for x in self._log.tensors if x.numel()]
        self._recorder.launched("triton", self._name, used)
        self._log.launched = self.key


@contextmanager
def stub_triton(
    recorder: Recorder, capability: tuple[int, int], shared: int
) -> Iterator[TritonLog]:
    """Let Triton compile for `capability` and note launches in `recorder`."""
    log = TritonLog()
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    stub = SimpleNamespace(
        get_current_device=lambda: 0,
        set_current_device=lambda index: None,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        launcher_cls=lambda source, metadata: _Launcher(recorder, log, source),
        utils=SimpleNamespace(
            load_binary=lambda name, kernel, size, index: (0, 0, 0, 0, MOST_THREADS),
            get_device_properties=lambda index: {"max_shared_mem": shared},
        ),
    )
    launches = _Launches(recorder, log)
    run, remember = JITFunction.run, CachedLaunch.__call__

    def through_triton(function: JITFunction, *arguments: Any, **options: Any) -> Any:
        return launches.through_triton(run, function, arguments, options)

    def remembered(launch: CachedLaunch, *arguments: Any) -> None:
        launches.remembered(remember, launch, *arguments)

    active = driver._active
    compiler.max_shared_mem.cache_clear()
    driver.set_active(stub)
    try:
        with (
            # Triton would hash its own files, 1.5 s of a core, to name what it keeps on disk.
            mock.patch.object(cache, "triton_key", return_value=triton.__version__),
            mock.patch.object(JITFunction, "run", through_triton),
            mock.patch.object(CachedLaunch, "__call__", remembered),
            mock.patch.object(cached_launch, "address", recorder.heap.address),
        ):
            yield log
    finally:
        driver._active = active
        compiler.max_shared_mem.cache_clear()
        launches.forget()


class _Launches:
    """Launches by Triton, and by the product's cache in front of it."""

    def __init__(self, recorder: Recorder, log: TritonLog) -> None:
        self.recorder, self.log = recorder, log
        # By identity; what they keep is for this device.
        self._functions: dict[int, JITFunction] = {}
        self._launches: dict[int, CachedLaunch] = {}

    def forget(self) -> None:
        for function in self._functions.values():
            function.device_caches.clear()
        for launch in self._launches.values():
            launch.forget()

    def remembered(
        self,
        remember: Callable[..., None],
        launch: CachedLaunch,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor],
        numbers: tuple[Any, ...],
    ) -> None:
        """Launch through the product's cache; it must find the code that Triton finds."""
        if id(launch) not in self._launches:
            launch.forget()  # code of another device
            self._launches[id(launch)] = launch
        self.log.tensors, self.log.launched = tensors, ""
        remember(launch, grid, tensors, numbers)
        self.log.tensors = ()
        if key := self.log.launched:
            self.log.remembered += 1
            expected = _key_of(
                launch.kernel, self._wrapped((*tensors, *numbers)), launch.constants, launch.options
            )
            if key != expected:
                self.recorder.problem(
                    f"{launch.kernel.__name__} is launched with code for other arguments: "
                    f"{key}, Triton's key is {expected}"
                )
            compiled = self.log.compiled[launch.kernel.__name__, key]
            self._note_sizes(compiled, launch.kernel, (*tensors, *numbers), grid)

    def through_triton(
        self,
        run: Callable[..., Any],
        function: JITFunction,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        if id(function) not in self._functions:
            function.device_caches.clear()  # of another device
            self._functions[id(function)] = function
        self.log.tensors = [x for x in arguments if isinstance(x, Tensor)]
        kernel = run(function, *self._wrapped(arguments), **options)
        self.log.tensors, self.log.launched = (), ""  # Triton chose the code
        kernels = function.device_caches[0][0]
        key = next(key for key, known_kernel in kernels.items() if known_kernel is kernel)
        known = self.log.compiled.get((function.__name__, key))
        if known is None:
            known = Compiled(function.__name__, key, product_line(), kernel.asm["ttir"])
            self.log.compiled[known.name, key] = known
            kernel.run.key = key
            _check_time(self.recorder, self.log, known)
        self._note_sizes(known, function, arguments, options["grid"])
        return kernel

    def _wrapped(self, arguments: tuple[Any, ...]) -> list[Any]:
        return [self._argument(x) for x in arguments]

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_meta:
            raise ValueError(f"a tensor of the host, {tuple(value.shape)}, is given to a kernel")
        return Argument(value.dtype, self.recorder.heap.address(value))

    def _note_sizes(
        self, known: Compiled, function: Any, arguments: tuple[Any, ...], grid: tuple[int, ...]
    ) -> None:
        for name, value in zip(function.arg_names, arguments, strict=False):
            if isinstance(value, Tensor):
                known.elements[name] = max(_elements(value), known.elements.get(name, 0))
            elif isinstance(value, int):
                known.integers[name] = max(abs(value), known.integers.get(name, 0))
        for axis, size in zip("xyz", grid, strict=False):
            name = f"grid.{axis}"
            known.integers[name] = max(size, known.integers.get(name, 0))


def _key_of(
    function: JITFunction, arguments: list[Any], constants: dict[str, Any], options: dict[str, Any]
) -> str:
    """Return the key that Triton's own code makes for a launch."""
    _, keys, _, _, binder = function.device_caches[0]
    options = options | {
        "debug": function.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    _, specialization, others = binder(*arguments, **constants, **options)
    key: str = compute_cache_key(keys, specialization, others)
    return key


def _check_time(recorder: Recorder, log: TritonLog, fresh: Compiled) -> None:
    if recorder.capturing is not None:
        recorder.problem(
            f"{fresh.name} is compiled inside capture {recorder.capturing.number}: {fresh.key}"
        )
    elif log.frozen:
        recorder.problem(f"{fresh.name} is compiled after the warm-up: {fresh.key}")


def _elements(tensor: Tensor) -> int:
    """Number of elements from a tensor's first to its last one."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
