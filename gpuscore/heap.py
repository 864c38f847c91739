"""The C library's heap: freed memory goes back to the system instead of staying for later.

glibc keeps what was freed, in an arena for each thread. With another C library these functions do
nothing.
"""

import ctypes
import gc

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # mallopt(3)


def collect_and_trim() -> None:
    """Collect garbage, then `trim`; quick where what was there at start is frozen (`gc.freeze`).

    Errors, their tracebacks and the frames in these form circles, and frames hold requests.
    """
    gc.collect()
    trim()


def trim() -> None:
    """Give back all pages without live blocks. Takes some milliseconds, during which other threads
    wait for memory."""
    if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):
        give_back(0)


def return_large_blocks(size: int) -> None:
    """Have freed blocks of `size` bytes and more go back at once, in the whole process.

    By default glibc raises its thresholds with the largest block that was freed, up to 64 MiB. From
    then on large blocks come from the heaps of threads, and `malloc_trim` leaves the upper end of
    these alone.
    """
    _set_option(M_MMAP_THRESHOLD, size)
    _set_option(M_TRIM_THRESHOLD, size)


def use_one_arena() -> None:
    """Have all threads share one arena; call it before there is a second thread.

    `trim` gives back the upper end of this one as well, and threads cannot each keep memory that
    the others need.
    """
    _set_option(M_ARENA_MAX, 1)


def _set_option(option: int, value: int) -> None:
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(option, value)
