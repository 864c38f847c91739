"""Time of a device: by its own clock on CUDA, by the host's elsewhere."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CYCLES = 2e9  # a second of waiting, on a card at up to 2 GHz


@dataclass(frozen=True)
class Taken:
    """What a run took."""

    seconds: float
    ahead: bool  # all was queued before the device began, so no gap in it is the host's


def on_device(run: Callable[[], object], device: torch.device, hold: float = 0.005) -> Taken:
    """One run, from its first kernel to its last.

    On CUDA the device is kept waiting for `hold` seconds first, while the host queues the work: the
    time is then that of the kernels back to back. If `run` itself waits for the device, or queues
    for longer than that, it counts the host's gaps as well, and `ahead` is False.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return Taken(time.perf_counter() - start, ahead=False)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(hold * CYCLES))
    first.record()
    run()
    last.record()
    ahead = not first.query()
    last.synchronize()
    return Taken(first.elapsed_time(last) / 1e3, ahead)


def median_seconds(
    run: Callable[[], object], device: torch.device, repeat: int = 10, warm: int = 2
) -> float:
    """Of `repeat` runs; the first ones, which may compile and allocate, are left out."""
    for _ in range(warm):
        run()
    return statistics.median(on_device(run, device).seconds for _ in range(repeat))
