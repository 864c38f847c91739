"""`torch.cuda` and Triton's driver for a device that is not there.

The product's own code runs: plan, memory measurement, graph launcher, kernels' launch functions.
torch's functions that would reach for the driver are replaced for a while, one by one. Triton finds
the code for a launch as on the device, foreign kernels too; what it would compile is noted instead.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from gpuscore_kernels import cached_launch
from gpuscore_kernels.cached_launch import CachedLaunch
from graphs.recorder import Capture, Recorder


class Stream:
    """A stream or an event; only the first stream has work, except in a capture."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def wait_stream(self, other: "Stream") -> None:
        """Wait for nothing: there is one stream."""

    def synchronize(self) -> None:
        self._recorder.waited("a synchronize")

    def record(self, stream: "Stream | None" = None) -> None:
        """Mark a place in the stream."""


class Graph:
    """A CUDA graph: a capture is recorded, a replay checks that its memory is still there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._capture: Capture | None = None

    def capture_begin(self, *pool: int, **options: Any) -> None:
        self._capture = self._recorder.begin_capture()

    def capture_end(self) -> None:
        self._recorder.end_capture()

    def replay(self) -> None:
        assert self._capture is not None
        self._recorder.replay(self._capture)


@contextmanager
def _on(recorder: Recorder, stream: Stream) -> Iterator[None]:
    before, recorder.stream = recorder.stream, stream
    try:
        yield
    finally:
        recorder.stream = before


def _functions(recorder: Recorder, capability: tuple[int, int]) -> dict[str, Any]:
    """Return the functions of `torch.cuda` that the product and torch's own `graph` call."""

    def empty_cache() -> None:
        recorder.forbidden("torch.cuda.empty_cache")
        recorder.empty_cache()

    def forget_peak(device: object = None) -> None:
        recorder.peak = recorder.reserved

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "mem_get_info": lambda device=None: (recorder.total - recorder.reserved, recorder.total),
        "memory_reserved": lambda device=None: recorder.reserved,
        "max_memory_reserved": lambda device=None: recorder.peak,
        "reset_peak_memory_stats": forget_peak,
        "empty_cache": empty_cache,
        "synchronize": lambda device=None: recorder.waited("torch.cuda.synchronize"),
        "graph_pool_handle": lambda: 1,
        "Stream": lambda device=None, **options: Stream(recorder),
        "Event": lambda **options: Stream(recorder),
        "CUDAGraph": lambda **options: Graph(recorder),
        "current_stream": lambda device=None: recorder.stream,
        "stream": lambda stream: _on(recorder, stream),
    }


# ---- Triton ----


class Argument:
    """A tensor as Triton sees it: a dtype and an address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True)
class Request:
    """Code that Triton was asked to compile."""

    function: JITFunction
    key: str  # Triton's
    source: Any  # triton.compiler.ASTSource
    options: Mapping[str, Any]


@dataclass
class TritonLog:
    """Code that Triton compiled, in order. Once `frozen` is set, more of it is a problem.

    Attributes:
        tensors: arguments of the present launch.
        remembered: launches for which the product knew the compiled code.
        launched: Triton's key of the code that was launched last.
    """

    compiled: list[Request] = field(default_factory=list)
    frozen: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    remembered: int = 0
    launched: str = ""


class Launches:
    """Launches by Triton, and by the product's cache in front of it."""

    def __init__(self, recorder: Recorder, log: TritonLog) -> None:
        self.recorder, self.log = recorder, log
        # By identity; what they keep is for this device.
        self.functions: dict[int, JITFunction] = {}
        self.launches: dict[int, CachedLaunch] = {}

    def compiled(self, function: JITFunction, key: str, signature: Any, *more: Any) -> Any:
        """Return what launches the code that Triton would compile."""
        device, constants, options, attributes, _ = more
        recorder, log = self.recorder, self.log
        source = function.ASTSource(function, signature, constants, attributes)
        log.compiled.append(Request(function, key, source, options.__dict__))
        if recorder.capturing or log.frozen:
            when = "inside a capture" if recorder.capturing else "after the warm-up"
            recorder.problem(f"{function.__name__} is compiled {when}: {key}")

        def launch(*arguments: Any) -> None:
            recorder.launched(f"triton {function.__name__}", [x for x in log.tensors if x.numel()])
            log.launched = key

        kernel = SimpleNamespace(
            run=launch, function=0, packed_metadata=(), launch_metadata=lambda *arguments: None
        )
        function.device_caches[device][0][key] = kernel
        return kernel

    def through_triton(
        self, run: Any, function: JITFunction, arguments: Any, options: Mapping[str, Any]
    ) -> Any:
        if id(function) not in self.functions:
            function.device_caches.clear()  # of another device
            self.functions[id(function)] = function
        self.log.tensors = [x for x in arguments if isinstance(x, Tensor)]
        kernel = run(function, *self.wrapped(arguments), **options)
        self.log.tensors, self.log.launched = [], ""  # Triton chose the code
        return kernel

    def remembered(
        self, remember: Any, launch: CachedLaunch, grid: Any, tensors: Any, numbers: Any
    ) -> None:
        """Launch through the product's cache; it must find the code that Triton finds."""
        if id(launch) not in self.launches:
            forget(launch)  # code of another device
            self.launches[id(launch)] = launch
        log = self.log
        log.tensors, log.launched = list(tensors), ""
        remember(launch, grid, tensors, numbers)
        log.tensors = []
        if log.launched:
            log.remembered += 1
            expected = _key_of(launch, self.wrapped((*tensors, *numbers)))
            if log.launched != expected:
                self.recorder.problem(
                    f"{launch.kernel.__name__} is launched with code for other arguments: "
                    f"{log.launched}, Triton's key is {expected}"
                )

    def wrapped(self, arguments: Any) -> list[Any]:
        address = self.recorder.address
        return [Argument(x.dtype, address(x)) if isinstance(x, Tensor) else x for x in arguments]

    def forget(self) -> None:
        for function in self.functions.values():
            function.device_caches.clear()
        for launch in self.launches.values():
            forget(launch)


def forget(launch: CachedLaunch) -> None:
    launch.codes.clear()
    launch._latest, launch._driver = cached_launch._NEVER, None


@contextmanager
def _triton(recorder: Recorder, capability: tuple[int, int]) -> Iterator[TritonLog]:
    """Let Triton choose code for `capability`, and note launches in `recorder`."""
    log, run, remember = TritonLog(), JITFunction.run, CachedLaunch.__call__
    launches, active = Launches(recorder, log), driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda index: 0,
            get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )
    replaced = (
        (JITFunction, "run", lambda f, *args, **more: launches.through_triton(run, f, args, more)),
        (JITFunction, "_do_compile", lambda f, *args: launches.compiled(f, *args)),
        (CachedLaunch, "__call__", lambda *args: launches.remembered(remember, *args)),
        (cached_launch, "address", recorder.address),
    )
    try:
        with ExitStack() as stack:
            for owner, name, function in replaced:
                stack.enter_context(mock.patch.object(owner, name, function))
            yield log
    finally:
        driver._active = active
        launches.forget()


def _key_of(launch: CachedLaunch, arguments: list[Any]) -> str:
    """Return the key that Triton's own code makes for a launch."""
    function = launch.kernel
    _, keys, _, _, binder = function.device_caches[0]
    options = launch.options | {
        "debug": function.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    _, specialization, others = binder(*arguments, **launch.constants, **options)
    key: str = compute_cache_key(keys, specialization, others)
    return key


@contextmanager
def device(
    capability: tuple[int, int] = (9, 0), memory: int = 141 * 10**9
) -> Iterator[tuple[Recorder, TritonLog]]:
    """Put a device in the place of CUDA's, for the calling thread's torch calls and for Triton.

    Other threads enter the recorder themselves.
    """
    recorder = Recorder(memory)
    recorder.main = recorder.stream = Stream(recorder)
    with ExitStack() as stack:
        for name, function in _functions(recorder, capability).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch.cuda.graph, "default_capture_stream", None))
        stack.enter_context(mock.patch.object(torch._C, "_host_emptyCache", create=True))
        log = stack.enter_context(_triton(recorder, capability))
        # Outside of it, torch resolves "cuda" before a dispatch mode sees it.
        stack.enter_context(torch.inference_mode())
        stack.enter_context(recorder)
        yield recorder, log
