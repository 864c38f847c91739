"""The return of memory to the system after large requests.

Without this, after a burst of bodies of 16 MiB hundreds of megabytes would stay with the process.
"""

import asyncio
from collections.abc import Callable

from gpuscore.dialects.dialect import LARGE
from gpuscore.system.heap import collect_and_trim

PAUSE = 0.5  # seconds from a large request to the trim, and so the least time between two trims


class Trimmer:
    """A trimmer: gives memory back at most every PAUSE seconds, after large requests have ended.

    Args:
        run: runs a function in a thread.
    """

    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run = run
        self._timer: asyncio.TimerHandle | None = None

    def used(self, size: int) -> None:
        """Note the end of a request with a body or ids of `size` bytes, or of work on `size`
        characters."""
        if size >= LARGE and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        self._run(collect_and_trim)
