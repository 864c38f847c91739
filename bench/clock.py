"""Timing of a device: by its own clock on CUDA, by the host's clock elsewhere."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CYCLES = 2e9  # clock cycles per second of waiting; at least a second on a card of up to 2 GHz


@dataclass(frozen=True)
class Taken:
    """The time of one run."""

    seconds: float
    ahead: bool  # everything was queued before the device began, so no gap is due to the host


def on_device(run: Callable[[], object], device: torch.device, hold: float = 0.005) -> Taken:
    """Time one run, from its first kernel to its last.

    On CUDA the device first waits for `hold` seconds while the host queues the work, so only the
    kernels are timed, without gaps. If `run` itself waits for the device, or takes longer than
    `hold` to queue, the time includes gaps due to the host, and `ahead` is False.
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
    """Return the median of `repeat` runs, after `warm` runs, which may compile and allocate."""
    for _ in range(warm):
        run()
    return statistics.median(on_device(run, device).seconds for _ in range(repeat))
