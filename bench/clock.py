"""Timing of a device: by its own clock on CUDA, by the host's clock elsewhere."""

import statistics
import time
from collections.abc import Callable

import torch

CPU = torch.device("cpu")
CYCLES = 2e9  # clock cycles per second of waiting; at least a second on a card of up to 2 GHz


def on_device(run: Callable[[], object], device: torch.device, hold: float = 0.005) -> float:
    """Return the seconds of one run, from its first kernel to its last.

    On CUDA the device first waits for `hold` seconds while the host queues the work, so only the
    kernels are timed, without gaps. If `run` itself waits for the device, or takes longer than
    `hold` to queue, the time includes gaps due to the host.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(hold * CYCLES))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def median_seconds(run: Callable[[], object], device: torch.device = CPU) -> float:
    """Return the median of ten runs, after two that may compile and allocate."""
    for _ in range(2):
        run()
    return statistics.median(on_device(run, device) for _ in range(10))
