"""A thread that does a backend's work for the device, in the order in which it is given."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import TypeVar

ResultT = TypeVar("ResultT")


class WorkThread:
    """An executor's only thread, whose work a caller may do itself while the thread has none.

    A change of thread and the way back take a tenth of a millisecond, which counts for work of one
    millisecond. For other work the thread is there: its caller goes on meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()  # for `_left`; whoever works in the thread's place holds it too
        self._left = 0  # works of the thread that are not done

    def submit(self, work: Callable[[], ResultT]) -> "Future[ResultT]":
        """Let the thread do the work after all that it was given before."""
        with self._lock:
            self._left += 1
        return self._executor.submit(self._counted, work)

    def do(self, work: Callable[[], ResultT]) -> "Future[ResultT]":
        """Do the work here and now, or as `submit` if the thread has work to do."""
        with self._lock:
            if not self._left:
                return _finished(work)
        return self.submit(work)

    def close(self) -> None:
        """End the thread after its present work; the rest is cancelled."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _counted(self, work: Callable[[], ResultT]) -> ResultT:
        try:
            return work()
        finally:
            with self._lock:
                self._left -= 1


def _finished(work: Callable[[], ResultT]) -> "Future[ResultT]":
    """Return a future with the result or the error of work that is done here."""
    future: Future[ResultT] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  (the future's `result` raises it)
        future.set_exception(error)
    return future
