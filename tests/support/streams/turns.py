"""Two threads that run one at a time; a seed decides after which operation they change.

So a run is the same every time, and many interleavings are tried. The engine's thread is the one
that makes the executor; the other takes the place of the backend's.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np

ENGINE, BACKEND = "engine", "backend"
CHANGE = 0.1  # probability of a change of thread at an operation
PATIENCE = 300  # seconds; a turn takes microseconds
_numbers = count()


class Handovers(Protocol):
    """Is told when one thread hands a task or a result over, and when another takes it."""

    def release(self, handover: object) -> None: ...

    def acquire(self, handover: object) -> None: ...


class Turns:
    """Lets one thread run at a time. A turn ends at `pause`, or when a thread has nothing to do.

    Attributes:
        name: of the thread whose turn it is.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.name = ENGINE
        self.changes = 0
        self._chances: list[bool] = []
        # Each is released by the other thread when its turn comes. Plain locks, because a semaphore
        # of Python takes several times as long.
        self._engine, self._backend = threading.Lock(), threading.Lock()
        self._engine.acquire()
        self._backend.acquire()
        self.backend_has_work = False

    def start_backend(self) -> None:
        """Let the calling thread, which is the backend's, wait for its turn."""
        self._backend.acquire()

    def pause(self) -> None:
        """Let the other thread go on, sometimes."""
        if self.backend_has_work and self._chance():
            self.change()

    def change(self) -> None:
        """Let the other thread run until it gives the turn back."""
        self.changes += 1
        me, mine, other = ENGINE, self._engine, self._backend
        if self.name == BACKEND:
            me, mine, other = BACKEND, other, mine
        self.name = ENGINE if me == BACKEND else BACKEND
        other.release()
        if not mine.acquire(timeout=PATIENCE):
            raise RuntimeError(f"thread {me} got no turn in {PATIENCE} s")

    def finish_backend(self) -> None:
        self.name = ENGINE
        self._engine.release()

    def _chance(self) -> bool:
        if not self._chances:
            self._chances = (self.rng.random(512) < CHANGE).tolist()
        return self._chances.pop()


class TurnExecutor:
    """Takes the place of a ThreadPoolExecutor with one thread.

    Args:
        turns: of its thread and the one that submits.
        handovers: learns that a task comes after its submission, and a result after its task.
        inside: entered by the thread for as long as it lives.
    """

    def __init__(
        self, turns: Turns, handovers: Handovers, inside: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._turns, self._handovers, self._inside = turns, handovers, inside
        self._tasks: deque[tuple[_TurnFuture, Callable[[], Any]]] = deque()
        self._closing = self._finished = False
        self._thread = threading.Thread(target=self._work, name=BACKEND, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future = _TurnFuture(self._turns, self._handovers)
        self._handovers.release(("task", future.number))
        self._tasks.append((future, partial(run, *arguments)))
        self._turns.backend_has_work = True
        self._turns.pause()
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        while cancel_futures and self._tasks:
            self._tasks.popleft()[0].cancel()
        self._closing = True
        while not self._finished:
            self._turns.change()
        self._thread.join()

    def _work(self) -> None:
        self._turns.start_backend()
        with self._inside():
            while not self._closing or self._tasks:
                if self._tasks:
                    self._run(*self._tasks.popleft())
                self._turns.backend_has_work = bool(self._tasks)
                if not self._tasks and not self._closing:
                    self._turns.change()
        self._turns.backend_has_work = False
        self._finished = True
        self._turns.finish_backend()

    def _run(self, future: "_TurnFuture", run: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._handovers.acquire(("task", future.number))
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001  (as an executor does)
            self._handovers.release(("result", future.number))
            future.set_exception(error)
        else:
            self._handovers.release(("result", future.number))
            future.set_result(result)


class _TurnFuture(Future[Any]):
    """A future that lets the backend's thread work while its result is waited for."""

    def __init__(self, turns: Turns, handovers: Handovers) -> None:
        super().__init__()
        self._turns, self._handovers = turns, handovers
        self.number = next(_numbers)

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._turns.change()
        self._handovers.acquire(("result", self.number))
        return super().result(timeout)
