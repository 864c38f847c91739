"""The memory of a torch device."""

from collections.abc import Callable

import torch

from gpuscore.backends.common.memory import HostMemory, Memory


def memory_of(device: torch.device, ranks: int = 1) -> Memory:
    """Return the memory of a rank; ranks share that of a CPU, and have GPUs of their own."""
    if device.type == "cuda":
        return DeviceMemory(device)
    return HostMemory() if ranks == 1 else MemoryShare(HostMemory(), ranks)


class MemoryShare:
    """An equal share of a memory.

    Args:
        whole: the memory.
        parts: processes that share it.
    """

    def __init__(self, whole: Memory, parts: int) -> None:
        self._whole, self._parts = whole, parts

    def free(self) -> int:
        return self._whole.free() // self._parts

    def growth(self, *parts: Callable[[], object]) -> int | None:
        return self._whole.growth(*parts)

    def trim(self) -> None:
        self._whole.trim()


class DeviceMemory:
    """A CUDA device's memory, which other processes may share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def growth(self, *parts: Callable[[], object]) -> int | None:
        """Memory that torch's allocator took during each part, plus what was taken outside of it.

        Blocks that the allocator keeps free between its allocations count as taken. Outside of it
        are workspaces and code of libraries, and other processes.
        """
        return sum(map(self._peak, parts))

    def _peak(self, run: Callable[[], object]) -> int:
        self.trim()
        torch.cuda.reset_peak_memory_stats(self._device)
        free, reserved = self.free(), torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        taken = torch.cuda.memory_reserved(self._device) - reserved
        beside = free - self.free() - taken
        return torch.cuda.max_memory_reserved(self._device) - reserved + max(0, beside)

    def trim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
