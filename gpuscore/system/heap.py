"""Settings of glibc's heap: which freed memory it keeps, and which it returns to the system.

By default it keeps freed memory in an arena for each thread, and returns only large blocks at once.
With another C library these functions do nothing.
"""

import ctypes
import gc
import os

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8  # mallopt(3)
NEVER = -1  # M_TRIM_THRESHOLD: only `trim` returns the end of the heap
KEPT = 1 << 30  # bytes; larger blocks are few, and are still returned at once
# Environment variables that set the same thresholds. If one is set, it is kept.
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def collect_and_trim() -> None:
    """Collect garbage, then `trim`. This is quick, as the server's start ends with `gc.freeze`.

    The collection comes first: errors, tracebacks and frames refer to each other in cycles, and
    these keep requests in memory.
    """
    gc.collect()
    trim()


def trim() -> None:
    """Return all pages without live blocks to the system. This takes some milliseconds, during
    which other threads wait for memory."""
    if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):
        give_back(0)


def return_large_blocks(size: int) -> None:
    """Let the whole process return freed blocks of `size` bytes and more at once.

    By default glibc raises its threshold to the size of the largest freed block, up to 32 MiB. It
    then takes smaller blocks from the threads' heaps, and `malloc_trim` does not return the upper
    end of these.
    """
    _set_option(M_MMAP_THRESHOLD, size)
    _set_option(M_TRIM_THRESHOLD, size)


def keep_freed_blocks() -> None:
    """Let the whole process keep freed blocks of up to `KEPT` bytes until `trim`.

    By default glibc returns freed blocks of over 32 MiB, and the end of the heap beyond 64 MiB. A
    forward pass frees and takes such blocks in every layer, and each new page costs a page fault
    and is filled with zeros. Thresholds that the environment sets stay.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or any(
        name in tunables for name in _TUNABLES
    ):
        return
    _set_option(M_MMAP_THRESHOLD, KEPT)
    _set_option(M_TRIM_THRESHOLD, NEVER)


def use_one_arena() -> None:
    """Let all threads share one arena. Call this before a second thread starts.

    `trim` can return the end of this arena. With an arena each, threads would keep memory that
    other threads need.
    """
    _set_option(M_ARENA_MAX, 1)


def _set_option(option: int, value: int) -> None:
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(option, value)
