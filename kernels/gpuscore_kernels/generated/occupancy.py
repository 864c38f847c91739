"""Blocks that a multiprocessor can hold, from what a block needs.

The limits are those of the CUDA C++ Programming Guide's table of compute capabilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

KIB = 1024
REGISTERS = 64 * 1024  # of a multiprocessor, on all architectures here
PARTITIONS = 4  # of a multiprocessor; a warp's registers are in one of them
REGISTER_UNIT = 256  # a warp gets a multiple of this
RESERVED = KIB  # shared memory that the system takes of each block


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of one architecture."""

    warps: int
    blocks: int
    shared: int  # bytes
    block_shared: int  # bytes that one block may have


MULTIPROCESSORS: Mapping[int, Multiprocessor] = MappingProxyType(
    {
        80: Multiprocessor(64, 32, 164 * KIB, 163 * KIB),
        89: Multiprocessor(48, 24, 100 * KIB, 99 * KIB),
        90: Multiprocessor(64, 32, 228 * KIB, 227 * KIB),
        120: Multiprocessor(48, 24, 100 * KIB, 99 * KIB),
    }
)


def resident_blocks(arch: int, warps: int, registers: int, shared: int) -> int:
    """Return how many blocks of `warps` warps fit, with `registers` per thread.

    `shared` is a block's shared memory in bytes. 0 means that not one block fits.
    """
    limits = MULTIPROCESSORS[arch]
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps
    by_shared = limits.shared // (shared + RESERVED)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)
