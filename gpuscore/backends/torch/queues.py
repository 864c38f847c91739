"""Queues of work for a device: the current stream of a CUDA device; a CPU does work at once.

Only `wait`, the functions that `download` returns, and at start `capture` wait for the device.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Replay = Callable[[], None]


class Queue(Protocol):
    """Work for one device, done in the order in which it was queued."""

    device: torch.device

    def host(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory that can be copied while the host continues (pinned on CUDA)."""

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Queue a copy; `host` must keep its contents until a later `download` was waited for."""

    def download(self, device: Tensor, host: Tensor) -> Callable[[], None]:
        """Queue a copy; the returned function waits until it and all work before it is done."""

    def wait(self) -> None:
        """Wait until the device has done all work, copies in both directions included."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Return a function that repeats the work of `run`, on the same memory, in one launch.

        `run` is called here, more than once on CUDA, and its results are left in place. Memory
        that it allocates may be reused by other captures. Drop all captures together: on CUDA,
        graphs share cuBLAS' workspace of the stream on which torch captures, and torch frees it as
        soon as any one of them is destroyed (pytorch issue 193402).
        """


class HostQueue:
    """Buffers and copies on a CPU, where nothing has to wait."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def host(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def download(self, device: Tensor, host: Tensor) -> Callable[[], None]:
        host.copy_(device)
        return lambda: None

    def wait(self) -> None:
        pass

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        return run


class CudaQueue:
    """A CUDA device. All work, copies included, is on one stream, which alone orders it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graph_memory = torch.cuda.graph_pool_handle()

    def host(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host, non_blocking=True)

    def download(self, device: Tensor, host: Tensor) -> Callable[[], None]:
        host.copy_(device, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.device))
        return done.synchronize

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, run: Callable[[], None]) -> Replay:
        run()  # compiles kernels and sets up libraries, which is not allowed during a capture
        self.wait()
        graph = torch.cuda.CUDAGraph()
        # With the default mode, another thread that asks for free memory would end the capture.
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            run()
        return graph.replay


def queue_of(device: torch.device) -> Queue:
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
