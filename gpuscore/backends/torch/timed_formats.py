"""The number format of `--dtype auto` on a CPU: float32 where its products are clearly faster."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TypeAlias

import torch
from torch.nn import functional

# Of the timed product: as many rows as a small batch has, and not so many weights that it lasts.
ROWS, WEIGHTS = 256, 2**20
SECONDS, LEAST_PAIRS = 0.05, 3  # for the whole measurement, after one pair that is not counted
LEAST_GAIN = 0.1  # share of its time that float32 has to save; less may be noise

Seconds: TypeAlias = tuple[float, float]


def time_products(
    dtype: torch.dtype,
    width: int,
    outputs: int,
    threads: int | None,
    clock: Callable[[], float] = perf_counter,
) -> Seconds:
    """Return the median seconds of a product in a format, and of the same product in float32.

    The two take turns, so that another program slows down both.

    Args:
        dtype: the format.
        width: of the rows.
        outputs: of the layer; of large ones a part is computed.
        threads: number that compute; None: as many as torch takes.
        clock: returns seconds.
    """
    kept = torch.get_num_threads()
    torch.set_num_threads(threads or kept)
    outputs = max(1, min(outputs, WEIGHTS // width))
    operands = [
        (torch.ones(ROWS, width, dtype=kind), torch.ones(outputs, width, dtype=kind))
        for kind in (dtype, torch.float32)
    ]
    times: tuple[list[float], list[float]] = ([], [])
    try:
        with torch.inference_mode():
            for x, weight in operands:  # the library prepares itself for the sizes
                functional.linear(x, weight)
            end = clock() + SECONDS
            while len(times[0]) < LEAST_PAIRS or clock() < end:
                for (x, weight), own in zip(operands, times, strict=True):
                    begin = clock()
                    functional.linear(x, weight)
                    own.append(clock() - begin)
    finally:
        torch.set_num_threads(kept)
    return median(times[0]), median(times[1])


def faster_format(name: str, seconds: Seconds) -> tuple[str, str]:
    """Return the name of the format to compute in, and why.

    Args:
        name: of the checkpoint's format.
        seconds: of `time_products`.
    """
    own, full = seconds
    chosen = "float32" if full <= (1 - LEAST_GAIN) * own else name
    return chosen, f"a product took {own * 1e3:.2f} ms in {name}, {full * 1e3:.2f} ms in float32"
