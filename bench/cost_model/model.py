"""`Model`: fitted parameters, and times predicted with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cost_model.attention import attention_cycles
from cost_model.cards import Card
from cost_model.cycles import Overlap
from cost_model.products import product_cycles
from cost_model.published import Attention, Product, Work

# Microseconds by which a kernel takes longer than its work: the launch inside a stream or a graph,
# and the first and last blocks. An assumption between the 0.5 us from node to node of a graph
# (https://developer.nvidia.com/blog/cuda-graphs/) and the 3 us that a kernel takes at least there.
LAUNCH_US = 2.0

Cards: TypeAlias = Mapping[str, Card]


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters, all fitted.

    Args:
        speed: by card: share of the boost clock's rate that large products reach. It stands for
            the clock under load, so cycles of every kernel have it.
        overhead: cycles of a product's tile outside of its loop.
        memory: share of the memory's bandwidth that row-wise kernels reach.
        overlap: by kind of tensor core.
    """

    speed: Mapping[str, float]
    overhead: float
    memory: float
    overlap: Mapping[str, Overlap]

    @property
    def num_parameters(self) -> int:
        return len(self.speed) + 2 + 4 * len(self.overlap)

    def microseconds(self, cycles: float, card: Card) -> float:
        """Convert a kernel's cycles on a card under load into its time."""
        return cycles / (1e3 * card.clock_ghz * self.speed[card.measured_as]) + LAUNCH_US

    def memory_us(self, size: float, card: Card) -> float:
        """Time to read and write `size` bytes."""
        return size / (1e3 * card.memory_gb_s * self.memory) + LAUNCH_US

    def predict(self, work: Work, card: Card) -> float:
        """Return the time of one kernel in microseconds."""
        if isinstance(work, Attention):
            cycles = attention_cycles(work, card, self.overlap[card.tensor_cores])
            return self.microseconds(cycles, card)
        if isinstance(work, Product):
            busy = self.microseconds(product_cycles(work, card, self.overhead), card)
            return max(busy, self.memory_us(work.bytes, card))
        return self.memory_us(work.bytes, card)
