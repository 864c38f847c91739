"""Times of `extend_attention`, from its generated code and from a batch's tile tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

from cost_model.cards import Card
from cost_model.cycles import Loop, Overlap, iteration, parts
from gpuscore_kernels.extend_attention import TileConfig, TileTable
from gpuscore_kernels.extend_attention.layout import (
    MASKED_END,
    MASKED_START,
    NUM_PACKED,
    NUM_ROWS,
    POOL_END,
    POOL_START,
)
from gpuscore_kernels.extend_attention.triton import (
    constants,
    divisible,
    extend_attention_kernel,
    signature,
)
from gpuscore_kernels.variant import ARCHES, Variant
from kernel_code.facts import CodeFacts, LoopFacts, copied_bytes, matrix_flop

THREADS = 32


def shipped_arch(card: Card) -> int:
    """Return the newest architecture with shipped kernels that is not newer than the card's."""
    return max(arch for arch in ARCHES if arch <= card.arch)


def variant_of(arch: int, group: int, dim: int, config: TileConfig) -> Variant:
    """Return the variant of bfloat16 with pages, for one configuration."""
    choices = {"cap": False, "need_lse": False}
    return Variant(
        name=described(config),
        kernel=extend_attention_kernel,
        signature=signature("bf16"),
        constexprs=constants(group, dim, config, window=None, **choices),
        divisible=divisible(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        arches=(arch,),
    )


def described(config: TileConfig) -> str:
    """Write a configuration in words."""
    size = f"{config.rows} x {config.keys}, masked {config.own}"
    return f"{size}, {config.num_warps} warps, {config.num_stages} stages" + (
        ", carries slots" if config.carry_slot else ""
    )


@dataclass(frozen=True, slots=True)
class Code:
    """The three loops of the kernel, as the model sees them."""

    pool: Loop
    packed: Loop
    masked: Loop

    @staticmethod
    def of(facts: CodeFacts) -> "Code":
        """Read the loops with matrix products, which are in the order of the source.

        Raises:
            ValueError: there are not three of them.
        """
        loops = [loop for loop in facts.loops if loop.products]
        if len(loops) != 3:
            raise ValueError(f"extend_attention has 3 loops with products; found {len(loops)}")
        return Code(*(_loop(loop, facts.warps) for loop in loops))

    @property
    def loops(self) -> tuple[Loop, Loop, Loop]:
        return self.pool, self.packed, self.masked


def _loop(facts: LoopFacts, warps: int) -> Loop:
    """Return a loop; its copies are ahead if as many as it starts may still be under way."""
    ahead = (facts.in_flight or 0) >= max(1, facts.groups)
    return Loop(
        flop=warps * matrix_flop(facts.opcodes),
        instructions=warps * facts.issue,
        special=THREADS * warps * facts.mufu,
        copied=warps * copied_bytes(facts.opcodes),
        trips=0 if ahead else 1 + (facts.awaited_loads > 0),
    )


def table_cycles(
    table: TileTable, code: Code, kv_heads: int, card: Card, overlap: Overlap
) -> float:
    """Return cycles from the first block's start to the last one's end.

    Blocks start in the order of the grid: all tiles of one KV head, then those of the next one,
    each on the multiprocessor that is free first.
    """
    each = [iteration(loop, card, overlap) for loop in code.loops]
    tiles = table.tiles[table.tiles[:, NUM_ROWS] > 0]
    counts = (
        tiles[:, POOL_END] - tiles[:, POOL_START],
        tiles[:, NUM_PACKED],
        tiles[:, MASKED_END] - tiles[:, MASKED_START],
    )
    lengths = overlap.startup + sum(
        count * cycles for count, cycles in zip(counts, each, strict=True)
    )
    return scheduled(list(lengths) * kv_heads, card.multiprocessors)


def scheduled(lengths: Sequence[float], servers: int) -> float:
    """Return the end of the last of these jobs, each begun in order on the first free server."""
    free = [0.0] * servers
    for length in lengths:
        heapreplace(free, free[0] + length)
    return max(free)


def bound(table: TileTable, code: Code, card: Card, overlap: Overlap) -> str:
    """Name the part of a multiprocessor that is busiest in the loop that runs most."""
    counts = (
        int((table.tiles[:, POOL_END] - table.tiles[:, POOL_START]).sum()),
        int(table.tiles[:, NUM_PACKED].sum()),
        int((table.tiles[:, MASKED_END] - table.tiles[:, MASKED_START]).sum()),
    )
    loop = code.loops[counts.index(max(counts))]
    name = parts(loop, card, overlap).bound
    return f"{name}, waits for copies" if loop.trips else name
