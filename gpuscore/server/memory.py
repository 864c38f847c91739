"""The return of memory to the system after large requests.

glibc keeps freed memory for later use, in an arena for each thread: hundreds of megabytes after a
burst of 16 MiB bodies. With another C library there is nothing to do.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable

LARGE = 1 << 18  # bytes of a body or of ids, or characters, from which a request counts as large
PAUSE = 0.5  # seconds from a large request to the trim, and so the least time between two trims


def find_trim() -> Callable[[], None]:
    """Return a function that gives free memory back to the system, in some milliseconds."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return lambda: None

    def trim() -> None:
        # A refused request's error, its traceback and the frames there may refer to each other in a
        # circle, and the frames hold the text. Objects made at start are frozen, so this is quick.
        gc.collect()
        library.malloc_trim(0)

    return trim


class Trimmer:
    """A trimmer: gives memory back at most every PAUSE seconds, after large requests have ended.

    Args:
        run: runs a function in a thread.
    """

    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run, self._trim = run, find_trim()
        self._timer: asyncio.TimerHandle | None = None

    def used(self, size: int) -> None:
        """Note the end of a request with a body or ids of `size` bytes, or of work on `size`
        characters."""
        if size >= LARGE and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        self._run(self._trim)
