"""Memory that large requests took goes back to the system.

glibc keeps what was freed for later: after a burst of bodies of 16 MiB hundreds of megabytes, in an
arena for each thread. With another C library there is nothing to do.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable

LARGE = 1 << 18  # bytes of a body or of ids, or characters, after which memory is given back
PAUSE = 0.5  # seconds from a large request to giving back, and so at least between two

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)


def fix_thresholds() -> None:
    """Have blocks of LARGE bytes and more go back to the system as soon as they are freed.

    By default glibc raises its thresholds with the largest block that was freed, to 64 MiB. From
    then on bodies come from the heaps of threads, and `malloc_trim` leaves the upper end of these
    alone. Applies to the whole process.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, LARGE)
        library.mallopt(M_TRIM_THRESHOLD, LARGE)


def find_trim() -> Callable[[], None]:
    """What gives back free memory, in some milliseconds."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return lambda: None

    def trim() -> None:
        # A refused request's error, its traceback and the frames that it knows may be in a circle,
        # and the frames know the text. What was there at start is frozen, so this takes little.
        gc.collect()
        library.malloc_trim(0)

    return trim


class Trimmer:
    """Gives memory back now and then while there are large requests, and after the last.

    Args:
        run: does work in a thread.
    """

    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run, self._trim = run, find_trim()
        self._timer: asyncio.TimerHandle | None = None

    def used(self, size: int) -> None:
        """A request is over that took about so many bytes, of its body or of ids; or work on so
        many characters is."""
        if size >= LARGE and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        self._run(self._trim)
