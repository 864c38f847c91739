"""Fused products in plain torch: the product, then what follows it."""

from torch import Tensor
from torch.nn.functional import linear

from gpuscore_kernels.gated.reference import gated
from gpuscore_kernels.qk_norm_rope_store import qk_norm_rope_store
from gpuscore_kernels.qk_norm_rope_store.pages import Pages


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return gated(linear(x, weight, bias), activation)


def heads_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    one_plus: bool,
    pages: Pages | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return qk_norm_rope_store(
        linear(x, weight, bias),
        cos,
        sin,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        q_norm=norms[0],
        k_norm=norms[1],
        eps=eps,
        one_plus=one_plus,
        pages=pages,
        impl="reference",
    )
