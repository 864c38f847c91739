"""The thread that launches a backend's work, and the translation of torch's errors to our own."""

import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Generic, TypeVar

import torch

from gpuscore.backends.base import DeviceLost, OutOfMemory
from gpuscore.errors import causes

ResultT = TypeVar("ResultT")


class Done(Generic[ResultT]):
    """The result or error of a task that ran in the caller's thread: a future without locks."""

    def __init__(self, task: Callable[[], ResultT]) -> None:
        self._error: Exception | None = None
        try:
            self._value = task()
        except Exception as error:  # noqa: BLE001  (`result` raises it)
            self._error = error

    def result(self) -> ResultT:
        if self._error is not None:
            raise self._error
        return self._value


class WorkThread:
    """Runs tasks one at a time: in an executor's only thread, or in the caller's if that is idle.

    Handing a task to a thread and its result back takes a tenth of a millisecond, which matters for
    a task of one millisecond (`do`). A longer task goes to the thread (`submit`), and the caller
    goes on.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()  # guards `_unfinished`; a caller that runs a task holds it too
        self._unfinished = 0  # submitted tasks that are not done

    def submit(self, task: Callable[[], ResultT]) -> "Future[ResultT]":
        """Let the thread run the task after all earlier ones."""
        with self._lock:
            self._unfinished += 1
        return self._executor.submit(self._counted, task)

    def do(self, task: Callable[[], ResultT]) -> "Future[ResultT] | Done[ResultT]":
        """Run the task here and now; if the thread is busy, submit it instead."""
        with self._lock:
            if not self._unfinished:
                return Done(task)
        return self.submit(task)

    def close(self) -> None:
        """End the thread after its present task; cancel the others."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _counted(self, task: Callable[[], ResultT]) -> ResultT:
        try:
            return task()
        finally:
            with self._lock:
                self._unfinished -= 1


# A RuntimeError with one of these texts means too little memory. The first line has those of a CPU:
# of torch's allocator on Linux and on other systems, and of C++. The others come from parts of CUDA
# that do not use torch's allocator.
_OUT_OF_MEMORY = (
    *("can't allocate memory", "not enough memory", "std::bad_alloc"),
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)

# Triton and cuBLAS raise a plain RuntimeError for an error of CUDA's driver (`_FROM_CUDA`). CUDA's
# documentation says that a process must end after those of `_FATAL`.
_FROM_CUDA = ("Triton Error [CUDA]", "CUBLAS_STATUS_")
_FATAL = (
    *("illegal memory access", "misaligned address", "illegal instruction"),
    *("invalid program counter", "operation not supported on global/shared address space"),
    *("hardware stack error", "unspecified launch failure", "device-side assert triggered"),
    *("launch timed out", "uncorrectable ECC error", "uncorrectable NVLink error"),
    *("context is destroyed", "unknown error", "EXECUTION_FAILED", "INTERNAL_ERROR"),
)


def translate_errors(run: Callable[[], ResultT], device: torch.device) -> ResultT:
    """Call `run`, which computes on `device`, and translate its errors to our own.

    Raises:
        OutOfMemory: there was too little memory, for torch or a library.
        DeviceLost: after this error, every CUDA call of the process fails.
        Exception: any other error of `run`.
    """
    try:
        return run()
    except Exception as error:
        failure = _translated(error, device)
        _delete_variables(error)
        del run
        if failure is None:
            raise
        raise failure from error


def _translated(error: Exception, device: torch.device) -> Exception | None:
    """Return the error to raise instead of `error`; None = raise `error` itself."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return OutOfMemory(text)
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in _OUT_OF_MEMORY):
        return OutOfMemory(text)
    from_cuda = any(phrase in text for phrase in _FROM_CUDA)
    fatal = from_cuda and any(phrase in text for phrase in _FATAL)
    if isinstance(error, torch.AcceleratorError) or fatal:
        return DeviceLost(text)
    reason = _device_error(device)
    return None if reason is None else DeviceLost(f"{text}; the device then reported: {reason}")


def _device_error(device: torch.device) -> str | None:
    """Return the error that every call to a CUDA device now gives, or None if the device works.

    Texts of libraries' errors vary, so the device itself is asked.
    """
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error)
    return None


def _delete_variables(error: BaseException) -> None:
    """Delete the local variables of all frames in the traceback of `error` and of its causes.

    They hold the failed batch's tensors, and an error can live long: in a future until the next
    batch has run, or with a caller of `Scorer`. The lines and names that a log shows stay.
    """
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
