"""Cycles of a block's loop, from its instructions: the arithmetic of the model.

One iteration needs the tensor cores, the special-function unit, issue slots and copies. If all of
them overlapped, it would take as long as the busiest; if nothing did, their sum. How much overlaps
is a parameter, `Overlap`.
"""

from dataclasses import dataclass

from cost_model.cards import Card

# Of one multiprocessor per cycle: instructions of a warp, and results (CUDA C++ Programming Guide,
# "Arithmetic Instructions", compute capabilities 8.0 to 12.0); bytes from the level-2 cache, of
# which 108 multiprocessors share 5,120 (NVIDIA's A100 whitepaper; those of later chips name none).
ISSUE_PER_CYCLE = 4
SPECIAL_PER_CYCLE = 16
COPY_BYTES_PER_CYCLE = 40
# Cycles from a copy's start to its first byte out of the level-2 cache (Luo et al., "Benchmarking
# and dissecting the NVIDIA Hopper GPU architecture", arXiv 2402.13499, table IV).
COPY_LATENCY = 262


@dataclass(frozen=True, slots=True)
class Loop:
    """One iteration of one block's loop.

    Args:
        flop: operations of matrix instructions.
        instructions: of all warps; each takes an issue slot.
        special: results of the special-function unit (exp2 and the like).
        copied: bytes that are copied into shared memory.
        trips: how often, one time after the other, the iteration waits for memory that it has just
            asked for; 0 if its copies were started an iteration before.
    """

    flop: float
    instructions: float
    special: float
    copied: float
    trips: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Parameters of one kind of tensor core; fitted.

    Args:
        tensor: share of the tensor cores' rate while they are in use, over that of products.
        exposed: share of the other work that nothing hides, between 0 (the busiest part decides)
            and 1 (the sum).
        sync: cycles of an iteration in which a block's warps wait for each other.
        startup: cycles of a block outside of its loops.
    """

    tensor: float
    exposed: float
    sync: float
    startup: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Cycles that one iteration keeps each part of a multiprocessor busy."""

    tensor: float
    special: float
    issue: float
    memory: float

    @property
    def bound(self) -> str:
        """Name of the part that is busy longest."""
        return max(self.__slots__, key=lambda name: float(getattr(self, name)))

    @property
    def most(self) -> float:
        return max(self.tensor, self.special, self.issue, self.memory)


def parts(loop: Loop, card: Card, overlap: Overlap) -> Parts:
    """Return the cycles of each part in one iteration of one block."""
    return Parts(
        tensor=loop.flop / card.flop_per_cycle / overlap.tensor,
        special=loop.special / SPECIAL_PER_CYCLE,
        issue=loop.instructions / ISSUE_PER_CYCLE,
        memory=loop.copied / COPY_BYTES_PER_CYCLE,
    )


def iteration(loop: Loop, card: Card, overlap: Overlap) -> float:
    """Return a multiprocessor's cycles for one iteration of one block.

    Several blocks on a multiprocessor take turns, so each counts in full: published kernels with
    two resident blocks were not faster than their sums.
    """
    busy = parts(loop, card, overlap)
    waited = busy.memory + loop.trips * COPY_LATENCY if loop.trips else 0.0
    total = busy.tensor + max(busy.special, busy.issue) + waited
    return busy.most + overlap.exposed * (total - busy.most) + overlap.sync
