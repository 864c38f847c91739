"""The queue of an event loop: work that must not make its rounds long."""

import asyncio
from collections import deque
from collections.abc import Callable


class Pacer:
    """Work in turns: pieces of it in each round, in order of arrival; the others wait.

    Args:
        pieces: returns the number of pieces for the current round.
    """

    def __init__(self, pieces: Callable[[], int]) -> None:
        self._pieces = pieces
        self._left = pieces()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._due = False  # `_run` will be called in the next round

    def __len__(self) -> int:
        """Return how much work waits."""
        return len(self._waiting)

    def take(self, cost: int) -> bool:
        """Count work of `cost` pieces that is done at once; return False if it must wait."""
        if self._waiting or self._left <= 0:
            return False
        self._left -= cost
        self._plan()
        return True

    def add(self, work: Callable[[], None], cost: int = 1) -> None:
        """Call `work` in a later round."""
        self._waiting.append((work, cost))
        self._plan()

    def _plan(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._due = False
        self._left = self._pieces()
        try:
            for _ in range(len(self._waiting)):
                if self._left <= 0:
                    break
                work, cost = self._waiting.popleft()
                self._left -= cost
                self._plan()  # the next round begins with new pieces
                work()
        finally:
            if self._waiting:
                self._plan()
