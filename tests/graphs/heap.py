"""The memory of a device that is not there: addresses, and bytes as torch's allocator counts them.

Sizes are rounded to blocks as the allocator rounds them, and what was freed stays reserved until
the cache is emptied. Fragmentation within what is reserved is not modelled.
"""

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 512  # bytes; every address is a multiple of it
FIRST_ADDRESS = 0x7F00_0000_0000
ORDINARY = 0  # the pool of everything that no graph owns


@dataclass(slots=True)
class Pool:
    """One of the allocator's memory pools; sizes in bytes."""

    live: int = 0
    reserved: int = 0
    graphs: int = 0  # that were captured into it and still exist


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of one storage."""

    address: int
    bytes: int  # asked for
    size: int  # in whole blocks
    pool: int
    capture: int  # number of the capture in which it was allocated; 0 = none
    where: str  # the line that allocated it


@dataclass(slots=True)
class DeviceHeap:
    """Memory of `total` bytes."""

    total: int
    pools: dict[int, Pool] = field(default_factory=lambda: {ORDINARY: Pool()})
    blocks: dict[int, Block] = field(default_factory=dict)  # by storage
    peak: int = 0  # most bytes reserved since `forget_peak`
    beside: int = 0  # bytes that the allocator does not know of: executables of graphs
    _next: int = FIRST_ADDRESS

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    @property
    def live(self) -> int:
        return sum(pool.live for pool in self.pools.values())

    @property
    def asked(self) -> int:
        """Bytes that are used, not rounded to blocks."""
        return sum(block.bytes for block in self.blocks.values())

    def take_beside(self, graph: object, count: int) -> None:
        """Take bytes outside of the allocator for as long as `graph` exists."""
        self._give_beside(-count)
        weakref.finalize(graph, self._give_beside, count)

    def own(self, pool: int, graph: object) -> None:
        """Keep a pool's memory reserved for as long as `graph` exists."""
        self.pools.setdefault(pool, Pool()).graphs += 1
        weakref.finalize(graph, self._disown, pool)

    def forget_peak(self) -> None:
        self.peak = self.reserved

    def empty_cache(self) -> None:
        """Give back what is reserved and not used, except what graphs own."""
        for pool in self.pools.values():
            if not pool.graphs:
                pool.reserved = pool.live

    def add(self, tensor: Tensor, pool: int, capture: int, where: str) -> None:
        """Give memory to a tensor's storage, unless it has some.

        Raises:
            torch.OutOfMemoryError: the device has none left.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.blocks:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        chosen = self.pools.setdefault(pool, Pool())
        self._make_room(chosen, size)
        chosen.live += size
        chosen.reserved = max(chosen.reserved, chosen.live)
        self.peak = max(self.peak, self.reserved)
        self.blocks[key] = Block(self._next, storage.nbytes(), size, pool, capture, where)
        self._next += max(size, BLOCK)
        weakref.finalize(storage, self._free, key)

    def block_of(self, tensor: Tensor) -> Block:
        return self.blocks[tensor.untyped_storage()._cdata]

    def address(self, tensor: Tensor) -> int:
        """Return what `data_ptr` returns on a device: 0 for a tensor without elements."""
        if tensor.numel() == 0:
            return 0
        return self.block_of(tensor).address + tensor.storage_offset() * tensor.element_size()

    def allocated_in(self, capture: int) -> list[Block]:
        """Return the living blocks that were allocated in a capture."""
        return [block for block in self.blocks.values() if block.capture == capture]

    def _make_room(self, pool: Pool, size: int) -> None:
        grown = max(0, pool.live + size - pool.reserved)
        if self.reserved + self.beside + grown > self.total:
            self.empty_cache()
            grown = max(0, pool.live + size - pool.reserved)
        if self.reserved + self.beside + grown > self.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {size} bytes asked for, {self.total - self.reserved} free"
            )

    def _give_beside(self, count: int) -> None:
        self.beside -= count

    def _disown(self, pool: int) -> None:
        self.pools[pool].graphs -= 1

    def _free(self, key: int) -> None:
        block = self.blocks.pop(key)
        self.pools[block.pool].live -= block.size
