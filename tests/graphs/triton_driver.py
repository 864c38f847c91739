"""A driver for Triton that launches nothing.

Triton computes its specialisation key, and compiles for the device's architecture, as on the
device; only the launch is left out. Its keys depend on the addresses of pointers, so tensors are
handed to it as `Argument`s with the addresses of a `DeviceHeap`, offsets included.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from graphs.recorder import Recorder, product_line

MOST_THREADS = 1024


class Argument:
    """A tensor as Triton sees it: a dtype and an address."""

    def __init__(self, tensor: Tensor, address: int) -> None:
        self.tensor, self.dtype, self._address = tensor, tensor.dtype, address

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
    """Kernels that Triton compiled, in order; `frozen` makes a further key a problem."""

    compiled: dict[tuple[str, str], Compiled] = field(default_factory=dict)
    frozen: bool = False


class _Launcher:
    """Stands for Triton's launcher of one compiled kernel; notes the launch."""

    def __init__(self, recorder: Recorder, source: Any) -> None:
        self._recorder, self._name = recorder, source.fn.__name__

    def __call__(self, *arguments: Any) -> None:
        used = [x.tensor for x in arguments if isinstance(x, Argument)]
        self._recorder.launched("triton", self._name, [x for x in used if x.numel()])


@contextmanager
def stub_triton(
    recorder: Recorder, capability: tuple[int, int], shared: int
) -> Iterator[TritonLog]:
    """Let Triton compile for `capability` and note launches in `recorder`."""
    log, touched = TritonLog(), {}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    stub = SimpleNamespace(
        get_current_device=lambda: 0,
        set_current_device=lambda index: None,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        launcher_cls=lambda source, metadata: _Launcher(recorder, source),
        utils=SimpleNamespace(
            load_binary=lambda name, kernel, size, index: (0, 0, 0, 0, MOST_THREADS),
            get_device_properties=lambda index: {"max_shared_mem": shared},
        ),
    )
    run = JITFunction.run

    def launch(function: JITFunction, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        touched.setdefault(id(function), (function, function.device_caches.copy()))
        return _run(run, recorder, log, function, given, options, grid=grid, warmup=warmup)

    active = driver._active
    compiler.max_shared_mem.cache_clear()
    driver.set_active(stub)
    try:
        with mock.patch.object(JITFunction, "run", launch):
            yield log
    finally:
        driver._active = active
        compiler.max_shared_mem.cache_clear()
        for function, _ in touched.values():
            function.device_caches.clear()


def _run(
    run: Callable[..., Any],
    recorder: Recorder,
    log: TritonLog,
    function: JITFunction,
    given: tuple[Any, ...],
    options: dict[str, Any],
    **how: Any,
) -> Any:
    if function.fn.__name__ not in {name for name, _ in log.compiled}:
        function.device_caches.clear()  # of another device
    wrapped = [_argument(x, recorder) for x in given]
    options = {name: _argument(x, recorder) for name, x in options.items()}
    kernel = run(function, *wrapped, **options, **how)
    kernels = function.device_caches[0][0]
    key = next(key for key, one in kernels.items() if one is kernel)
    known = log.compiled.get((function.fn.__name__, key))
    if known is None:
        known = Compiled(function.fn.__name__, key, product_line(), kernel.asm["ttir"])
        log.compiled[known.name, key] = known
        _check_time(recorder, log, known)
    given_by_name = dict(zip(function.arg_names, given, strict=False))
    grid = {f"grid.{axis}": size for axis, size in zip("xyz", how["grid"], strict=False)}
    _note_sizes(known, given_by_name | grid)
    return kernel


def _check_time(recorder: Recorder, log: TritonLog, fresh: Compiled) -> None:
    if recorder.capturing is not None:
        recorder.problem(
            f"{fresh.name} is compiled inside capture {recorder.capturing.number}: {fresh.key}"
        )
    elif log.frozen:
        recorder.problem(f"{fresh.name} is compiled after the warm-up: {fresh.key}")


def _note_sizes(known: Compiled, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor):
            known.elements[name] = max(_elements(value), known.elements.get(name, 0))
        elif isinstance(value, int):
            known.integers[name] = max(abs(value), known.integers.get(name, 0))


def _elements(tensor: Tensor) -> int:
    """Number of elements from a tensor's first to its last one."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _argument(value: Any, recorder: Recorder) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.is_meta:
        raise ValueError(f"a tensor of the host, {tuple(value.shape)}, is given to a kernel")
    return Argument(value, recorder.heap.address(value))
