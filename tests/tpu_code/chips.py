"""TPU generations: what `libtpu` compiles for, and peak rates with their sources.

Google's pages of v5e and v6e (docs.cloud.google.com/tpu/docs/v5e and .../v6e) have the rates of
bfloat16 and int8, the bandwidth, and the number and size of matrix units. libtpu 0.0.42.1 computes
with the same: `cost_analysis()["optimal_seconds"]` of an 8192^3 product is that of 197 and 918
TFLOP/s. The memory that a program may use is in its error for one that needs more.

**Assumed, not published:** clocks, which turn XLA's estimated cycles into seconds. 1.5 GHz is
v5e's 197 TFLOP/s over 4 x 128 x 128 multiply-adds. With 1.75 GHz for v6e (which is v5p's: 459
TFLOP/s over 2 x 4 x 128 x 128), XLA's estimate for a copy reaches 81 % of the published bandwidth
on both. A vector unit has four operations per lane and cycle and one exponential, as "How to Scale
Your Model" (jax-ml.github.io/scaling-book/tpus) says of v5p.
"""

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    name: str  # v5e or v6e
    hbm: int  # bytes that a program may use
    bandwidth: float  # bytes per second
    bf16: float  # operations per second, two per multiply-add
    int8: float
    matrix_side: int  # rows and columns of a matrix unit; smaller products leave a part of it idle
    clock: float  # cycles per second
    scalar_memory: int  # bytes (SMEM)
    vector_memory: int  # bytes (VMEM)

    @property
    def lane_operations(self) -> float:
        """Operations of the vector unit per second."""
        return 8 * 128 * 4 * self.clock

    @property
    def exponentials(self) -> float:
        """Transcendental functions per second."""
        return 8 * 128 * self.clock

    def device(self) -> Any:
        """Return the first device of this kind, which need not be there."""
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(
            f"{self.name}:1x1", platform="tpu", chips_per_host_bounds=(1, 1, 1)
        )
        return topology.devices[0]


V5E = Chip(
    name="v5e",
    hbm=int(15.75 * GIB),
    bandwidth=819e9,
    bf16=197e12,
    int8=393e12,
    matrix_side=128,
    clock=1.5e9,
    scalar_memory=2**20,
    vector_memory=128 * 2**20,
)
V6E = Chip(
    name="v6e",
    hbm=int(31.25 * GIB),
    bandwidth=1638e9,
    bf16=918e12,
    int8=1836e12,
    matrix_side=256,
    clock=1.75e9,
    scalar_memory=2**20,
    vector_memory=128 * 2**20,
)
CHIPS = {chip.name: chip for chip in (V5E, V6E)}
