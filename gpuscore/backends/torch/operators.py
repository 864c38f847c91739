"""How a decoder computes: the form of each function, and how many rows at a time."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from torch import Tensor
from torch.nn import functional

from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.layers import ByRows, all_at_once
from gpuscore.backends.torch.linear import Products
from gpuscore_kernels import Implementation


@dataclass(frozen=True)
class Operators:
    """The functions that a decoder's layers call."""

    compiler: Compiler = eagerly  # makes row-wise functions fast
    by_rows: ByRows = all_at_once  # makes a function of rows compute all at once, or tile by tile
    _: KW_ONLY
    impl: Implementation = "reference"  # "triton": one kernel for the heads of a QKV product
    # (token ids [T], table [V, E]) -> rows of the table [T, E]
    embedding: Callable[[Tensor, Tensor], Tensor] = functional.embedding
    # (rows, weights of gate and up) -> silu(gate) * up, in one kernel
    gated_product: Callable[[Tensor, Tensor], Tensor] | None = None
    gated_from: int = 0  # the fewest rows that `gated_product` computes

    @property
    def in_tiles(self) -> bool:
        return self.by_rows is not all_at_once

    @cached_property
    def products(self) -> Products:
        return Products(self.compiler)
