"""Operations and bytes of a program with the trip counts that a batch gives its loops."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from tpu_code.hlo import Where

LANES, SUBLANES = 128, 8
# One or more transcendental functions per element; the rest of the vector unit's operations take a
# slot each.
TRANSCENDENTAL = {"exp", "exp2", "log", "log1p", "tanh", "logistic", "rsqrt", "sqrt", "div", "pow"}
TRANSCENDENTAL |= {"sin", "cos", "erf", "integer_pow_inverse"}
# Only move elements, or none.
MOVES = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "transpose", "slice"}
MOVES |= {"get", "swap", "concatenate", "stack", "split", "dynamic_slice", "program_id", "copy"}
MOVES |= {"dma_wait", "num_programs", "stop_gradient", "bitcast_convert_type", "semaphore_wait"}
MOVES |= {
    "multiple_of",
    "optimization_barrier",
    "semaphore_signal",
    "semaphore_read",
    "debug_print",
}


class Product(NamedTuple):
    """A matrix product [m, k] x [k, n]."""

    m: int
    k: int
    n: int
    dtype: str

    @property
    def operations(self) -> int:
        return 2 * self.m * self.k * self.n

    def padded(self, side: int) -> int:
        """Operations that matrix units of this size spend; float32 takes six passes of bfloat16."""
        whole = 2 * self.m * (-(-self.k // side) * side) * (-(-self.n // side) * side)
        return whole * (6 if self.dtype == "float32" else 1)


@dataclass
class Kernel:
    """Work of all calls of one Pallas kernel."""

    calls: int = 0
    programs: int = 0  # of all grids
    products: Counter[Product] = field(default_factory=Counter)
    lanes: int = 0  # operations of the vector unit, padding of lanes included
    transcendental: int = 0
    copied: int = 0  # bytes between HBM and VMEM, by copies and by the pipeline of blocks

    def __add__(self, other: "Kernel") -> "Kernel":
        return Kernel(
            self.calls + other.calls,
            self.programs + other.programs,
            self.products + other.products,
            self.lanes + other.lanes,
            self.transcendental + other.transcendental,
            self.copied + other.copied,
        )


Branch: TypeAlias = tuple[Where, int]


@dataclass
class Tally:
    """Runs of loops' bodies and of branches, and the work of kernels."""

    loops: Counter[Where] = field(default_factory=Counter)  # runs of the body
    branches: Counter[Branch] = field(default_factory=Counter)
    products: Counter[Product] = field(default_factory=Counter)  # outside of kernels
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def add(self, other: "Tally", times: int = 1) -> None:
        pairs: tuple[tuple[Counter[Any], Counter[Any]], ...] = (
            (self.loops, other.loops),
            (self.branches, other.branches),
            (self.products, other.products),
        )
        for mine, theirs in pairs:
            for key, count in theirs.items():
                mine[key] += count * times
        for name, kernel in other.kernels.items():
            for _ in range(times):
                self.kernels[name] = self.kernels.get(name, Kernel()) + kernel


def product_of(params: Mapping[str, Any], left: Any, right: Any) -> tuple[Product, int]:
    """Return a `dot_general` as a product and the number of times that it is computed."""
    (over, _), (batch, right_batch) = params["dimension_numbers"]
    right_over = params["dimension_numbers"][0][1]
    times = math.prod(left.shape[dim] for dim in batch)
    k = math.prod(left.shape[dim] for dim in over)
    m = math.prod(left.shape) // max(1, times * k)
    n = math.prod(
        size for dim, size in enumerate(right.shape) if dim not in (*right_over, *right_batch)
    )
    return Product(m, k, n, str(left.dtype)), times


def padded_elements(shape: tuple[int, ...]) -> int:
    """Elements of whole registers: the last two dimensions are padded to 8 x 128."""
    if not shape:
        return 0  # the scalar unit's
    *outer, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    padded = -(-rows // SUBLANES) * SUBLANES * (-(-lanes // LANES) * LANES)
    return math.prod(outer) * padded
