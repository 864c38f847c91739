"""Memory that large requests took goes back to the system.

Without this, after a burst of bodies of 16 MiB hundreds of megabytes would stay with the process.
"""

import asyncio
from collections.abc import Callable

from gpuscore.heap import collect_and_trim

LARGE = 1 << 18  # bytes of a body or of ids, or characters, after which memory is given back
PAUSE = 0.5  # seconds from a large request to giving back, and so at least between two


class Trimmer:
    """Gives memory back now and then while there are large requests, and after the last.

    Args:
        run: does work in a thread.
    """

    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run = run
        self._timer: asyncio.TimerHandle | None = None

    def used(self, size: int) -> None:
        """Note the end of a request, or of work on text, that used about so many bytes."""
        if size >= LARGE and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        self._run(collect_and_trim)
