"""A thread that does a backend's work for the device, and the meaning of the work's errors."""

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
    """The result or the error of work done in the caller's thread: a future without locks."""

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
    """An executor's only thread, whose work a caller may do itself while the thread has none.

    Changing threads and back takes a tenth of a millisecond, which counts for work of one
    millisecond. Longer work goes to the thread, and its caller goes on meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()  # for `_left`; whoever works in the thread's place holds it too
        self._left = 0  # works of the thread that are not done

    def submit(self, task: Callable[[], ResultT]) -> "Future[ResultT]":
        """Let the thread do the work after all that it was given before."""
        with self._lock:
            self._left += 1
        return self._executor.submit(self._counted, task)

    def do(self, task: Callable[[], ResultT]) -> "Future[ResultT] | Done[ResultT]":
        """Do the work here and now, or as `submit` if the thread has work to do."""
        with self._lock:
            if not self._left:
                return Done(task)
        return self.submit(task)

    def close(self) -> None:
        """End the thread after its present work; the rest is cancelled."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _counted(self, task: Callable[[], ResultT]) -> ResultT:
        try:
            return task()
        finally:
            with self._lock:
                self._left -= 1


# Texts of a RuntimeError for too little memory. On a CPU: from torch's allocator on Linux and on
# other systems, and from C++. On CUDA: from the runtime and Triton, outside of torch's allocator,
# and from libraries that allocate for themselves.
_OUT_OF_MEMORY = (
    *("can't allocate memory", "not enough memory", "std::bad_alloc"),
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)

# Errors of CUDA's driver after which the process has to end, according to its documentation; Triton
# and cuBLAS raise a plain RuntimeError for them.
_FROM_CUDA = ("Triton Error [CUDA]", "CUBLAS_STATUS_")
_FATAL = (
    *("illegal memory access", "misaligned address", "illegal instruction"),
    *("invalid program counter", "operation not supported on global/shared address space"),
    *("hardware stack error", "unspecified launch failure", "device-side assert triggered"),
    *("launch timed out", "uncorrectable ECC error", "uncorrectable NVLink error"),
    *("context is destroyed", "unknown error", "EXECUTION_FAILED", "INTERNAL_ERROR"),
)


def translated(run: Callable[[], ResultT], device: torch.device) -> ResultT:
    """Call `run`, which computes on `device`.

    Raises:
        OutOfMemory: there was too little memory, for torch or a library.
        DeviceLost: a CUDA error after which every CUDA call of the process fails.
        Exception: any other error of `run`.
    """
    try:
        return run()
    except Exception as error:
        failure = _meaning(error, device)
        _delete_variables(error)
        del run
        if failure is None:
            raise
        raise failure from error


def _meaning(error: Exception, device: torch.device) -> Exception | None:
    """Return the error that the engine gets instead of `error`; None = `error` itself."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return OutOfMemory(text)
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in _OUT_OF_MEMORY):
        return OutOfMemory(text)
    from_cuda = any(phrase in text for phrase in _FROM_CUDA)
    fatal = from_cuda and any(phrase in text for phrase in _FATAL)
    if isinstance(error, torch.AcceleratorError) or fatal:
        return DeviceLost(text)
    reason = _lost(device)
    return None if reason is None else DeviceLost(f"{text}; the device then said: {reason}")


def _lost(device: torch.device) -> str | None:
    """Return the error with which a CUDA device answers every call, or None if it still works.

    Libraries report such errors in texts of their own; the device tells for certain.
    """
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error)
    return None


def _delete_variables(error: BaseException) -> None:
    """Delete the local variables of all frames that failed on the way to `error`.

    An error may be kept for long: in a future until the next batch has run, and by a caller of
    `Scorer` for as long as it likes. Its traceback refers to the frames of the failed batch, and
    these to its tensors. Lines and names, which the log shows, stay.
    """
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
