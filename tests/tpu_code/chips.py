"""TPU generations: what `libtpu` compiles for, and the memory that a program may use there.

libtpu's error for a program that needs more of it names each size.
"""

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    name: str  # v5e or v6e
    hbm: int  # bytes that a program may use
    scalar_memory: int = 2**20  # bytes (SMEM)
    vector_memory: int = 128 * 2**20  # bytes (VMEM)

    def device(self) -> Any:
        """Return the first device of this kind, which need not be there."""
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(
            f"{self.name}:1x1", platform="tpu", chips_per_host_bounds=(1, 1, 1)
        )
        return topology.devices[0]


V5E = Chip("v5e", hbm=int(15.75 * GIB))
V6E = Chip("v6e", hbm=int(31.25 * GIB))
CHIPS = {chip.name: chip for chip in (V5E, V6E)}
