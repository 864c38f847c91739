"""`CodeFacts` and `LoopFacts`: the generated code of one variant, in numbers.

Opcodes are counted as nvdisasm writes them, with all modifiers ("LDGSTS.E.BYPASS.128"). A count is
per warp: each warp of a block executes every instruction, and a wgmma counts once in each of the
four warps that compute it together.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

Opcodes: TypeAlias = Mapping[str, int]  # number of instructions by opcode

WGMMA = ("HGMMA", "IGMMA")  # products of four warps together, of sm_90: of floats, of integers
MMA = ("HMMA", "IMMA")  # products of one warp

# Limits come from the CUDA C++ Programming Guide's table of compute capabilities.
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


def count(opcodes: Opcodes, *prefixes: str) -> int:
    """Number of instructions whose opcode starts with one of `prefixes`."""
    return sum(number for name, number in opcodes.items() if name.startswith(prefixes))


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """One loop of the machine code. Counts are of one iteration, without the loops inside it.

    Args:
        header: the loop's line in the kernel's source, with " #2" for its second copy, and so on;
            "?" for a loop that only the machine code shows.
        nesting: number of loops around it.
        in_flight: the fewest groups of asynchronous copies that may still be under way when the
            loop has waited for those that it needs (`ttg.async_wait`); None if it never waits.
        groups: groups of copies that an iteration starts.
        copy_bytes: the fewest bytes at a time that a thread copies of a tile; 0 without such
            copies. Copies of single numbers (tables) do not count.
        awaited_loads: loads from global memory on which the addresses of the iteration's own
            copies depend, so that the copies wait for them.
        tile_loads: loads of tiles from global memory into registers.
        opcodes: instructions of one warp.
    """

    header: str
    nesting: int
    in_flight: int | None
    groups: int
    copy_bytes: int
    awaited_loads: int
    tile_loads: int
    opcodes: Opcodes

    @property
    def issue(self) -> int:
        """Issue slots: all instructions."""
        return sum(self.opcodes.values())

    @property
    def wgmma(self) -> int:
        return count(self.opcodes, *WGMMA)

    @property
    def mma(self) -> int:
        return count(self.opcodes, *MMA)

    @property
    def products(self) -> int:
        """Matrix instructions of either kind."""
        return self.wgmma + self.mma

    @property
    def mufu(self) -> int:
        """Instructions of the special-function unit: exp2, log2, reciprocal."""
        return count(self.opcodes, "MUFU")

    @property
    def loads(self) -> int:
        """Loads from global memory into registers."""
        return count(self.opcodes, "LDG.")

    @property
    def copies(self) -> int:
        """Asynchronous copies from global into shared memory."""
        return count(self.opcodes, "LDGSTS")

    @property
    def spills(self) -> int:
        """Loads and stores of the stack."""
        return count(self.opcodes, "LDL", "STL")


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """The code of one variant for one architecture; sizes in bytes.

    Args:
        triton: Triton's version.
        arch: compute capability times ten.
        warps: of a block.
        registers: of a thread.
        stack: of a thread; spilled registers need it.
        shared: shared memory of a block.
        loops: in the order of their code.
        rest: instructions of one warp outside of loops.
    """

    triton: str
    arch: int
    warps: int
    registers: int
    stack: int
    shared: int
    loops: tuple[LoopFacts, ...]
    rest: Opcodes

    @property
    def resident(self) -> int:
        """Blocks that one multiprocessor holds at a time."""
        return resident_blocks(self.arch, self.warps, self.registers, self.shared)

    @property
    def wgmma(self) -> int:
        return count(self.rest, *WGMMA) + sum(loop.wgmma for loop in self.loops)

    @property
    def instructions(self) -> int:
        """Instructions of one warp outside of loops."""
        return sum(self.rest.values())

    @property
    def accesses(self) -> tuple[int, int]:
        """Loads and stores of global memory outside of loops: of 16 bytes, and of fewer."""
        every = {name: n for name, n in self.rest.items() if name.startswith(("LDG.", "STG."))}
        wide = sum(n for name, n in every.items() if name.endswith(".128"))
        return wide, sum(every.values()) - wide

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CodeFacts":
        loops = tuple(LoopFacts(**loop) for loop in data["loops"])
        return cls(**{**data, "loops": loops})
