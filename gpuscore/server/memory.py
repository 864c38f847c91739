"""Memory that large requests took goes back to the system.

glibc keeps what was freed for later. After a burst of bodies of 16 MiB that is hundreds of
megabytes: it learns from the first one that such blocks come often and puts them between small
ones, and what threads freed stays in an arena for each. So large blocks always get pages of their
own, which are unmapped when they are freed, and after large requests the rest is trimmed. With
another C library nothing is done.
"""

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BLOCK = 1 << 20  # bytes
LARGE_BODY = 1 << 18  # bytes of a request after which memory is given back
PAUSE = 0.5  # seconds from a large request to giving back, and so at least between two
M_MMAP_THRESHOLD = -3  # of malloc.h


def find_trim() -> Callable[[], None]:
    """Keep large blocks apart from now on; returns what gives back the rest, in some milliseconds
    without the GIL."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        return lambda: None
    library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
    return lambda: library.malloc_trim(0) and None


class Memory:
    """Gives memory back now and then while there are large requests, and after the last.

    Args:
        run: does work in a thread.
    """

    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run, self._trim = run, find_trim()
        self._timer: asyncio.TimerHandle | None = None

    def used(self, size: int) -> None:
        """A request with a body of so many bytes is over."""
        if size > LARGE_BODY and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        self._run(self._trim)
