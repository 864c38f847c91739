"""How a decoder computes: the form of each function, and how many rows at a time."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.layers import ByRows, all_at_once
from gpuscore.backends.torch.linear import Products
from gpuscore_kernels import Implementation
from gpuscore_kernels.hopper import FEWEST_ROWS


class Operators:
    """The functions that a decoder's layers call.

    Args:
        compiler: makes row-wise functions fast.
        by_rows: makes a function of rows compute all of them at once, or tile by tile.
        impl: "triton" to norm, rotate and store the heads of a QKV product in one kernel.
        embedding: (token ids [T], table [V, E]) -> rows of the table [T, E].
        gated_product: (rows, weights of gate and up) -> silu(gate) * up, in one kernel.
        gated_from: the fewest rows that `gated_product` computes; None = as many as pay off.
    """

    def __init__(
        self,
        compiler: Compiler = eagerly,
        by_rows: ByRows = all_at_once,
        *,
        impl: Implementation = "reference",
        embedding: Callable[[Tensor, Tensor], Tensor] = functional.embedding,
        gated_product: Callable[[Tensor, Tensor], Tensor] | None = None,
        gated_from: int | None = None,
    ) -> None:
        self.compiler = compiler
        self.by_rows = by_rows
        self.in_tiles = by_rows is not all_at_once
        self.impl: Implementation = impl
        self.embedding = embedding
        self.gated_product = gated_product
        self.gated_from = FEWEST_ROWS if gated_from is None else gated_from
        self.products = Products(compiler)
