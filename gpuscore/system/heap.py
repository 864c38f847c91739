"""The C library's heap: when freed memory stays for later, and when it goes back to the system.

glibc keeps freed memory in an arena for each thread; only large blocks go back at once. With
another C library these functions do nothing.
"""

import ctypes
import gc
import os

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8  # mallopt(3)
NEVER = -1  # M_TRIM_THRESHOLD: only `trim` gives the end of the heap back
KEPT = 1 << 30  # bytes; larger blocks are few, and still go back at once
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


def keep_freed_blocks() -> None:
    """Have freed blocks of up to `KEPT` bytes stay until `trim`, in the whole process.

    By default a block of over 32 MiB, and the end of the heap beyond 64 MiB, go back when they are
    freed. A forward pass frees and takes such blocks in every layer, and each page that comes anew
    costs a page fault and is filled with zeros. Thresholds in the environment are left alone.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or any(
        name in tunables for name in _TUNABLES
    ):
        return
    _set_option(M_MMAP_THRESHOLD, KEPT)
    _set_option(M_TRIM_THRESHOLD, NEVER)


def use_one_arena() -> None:
    """Have all threads share one arena; call it before there is a second thread.

    `trim` can give back the end of this arena. With an arena each, threads would keep memory that
    other threads need.
    """
    _set_option(M_ARENA_MAX, 1)


def _set_option(option: int, value: int) -> None:
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(option, value)
