"""Matrix products that go on with what follows them, in one launch instead of two.

For small batches: a library's product is faster than ours, but a launch less saves more than that
once a product takes only a few microseconds.
"""

from typing import Literal, TypeAlias

from torch import Tensor

from gpuscore_kernels.fused_products import reference
from gpuscore_kernels.gated.api import check_activation
from gpuscore_kernels.qk_norm_rope_store.api import check_heads
from gpuscore_kernels.qk_norm_rope_store.pages import Pages

Implementation: TypeAlias = Literal["reference", "triton"]


def gated_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    pdl: bool = False,
    impl: Implementation,
) -> Tensor:
    """Return act(gate) * up of the product of `x` with the weights of gate and up.

    Args:
        x: [T, E]; the elements of a row are contiguous, rows need not be.
        weight: [2 I, E], contiguous: rows of the gate, then of the up projection.
        bias: [2 I], or None.
        activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU with tanh's approximation).
        pdl: with "triton", begin before the kernel before has ended (`launch.has_pdl`).
        impl: "reference" (any device) or "triton".

    Returns:
        [T, I] in x's dtype. Rounding points are those of a product followed by `gated`: sums are
        float32, the product is rounded to x's dtype, and so are the activation and the result.

    Raises:
        ValueError: shapes or dtypes do not fit, or the activation is unknown.
    """
    _check(x, weight, bias)
    if len(weight) % 2:
        raise ValueError(f"weight must be [2 I, E], got {tuple(weight.shape)}")
    check_activation(activation)
    if impl == "reference":
        return reference.gated_product(x, weight, bias, activation)
    from gpuscore_kernels.fused_products import launch

    return launch.gated_product(x, weight, bias, activation, pdl)


def heads_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    one_plus: bool = False,
    pages: Pages | None = None,
    pdl: bool = False,
    impl: Implementation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `qk_norm_rope_store` of the product of `x` with the weights of all heads.

    Args:
        x: [T, E]; the elements of a row are contiguous, rows need not be.
        weight: [(H + 2 Hkv) D, E], contiguous: queries, keys, values.
        bias: [(H + 2 Hkv) D], or None.
        cos, sin, num_heads, num_kv_heads, q_norm, k_norm, eps, one_plus, pages: as for
            `qk_norm_rope_store`.
        pdl, impl: as for `gated_product`.

    Returns:
        q [T, H, D], k and v [T, Hkv, D] in x's dtype. The product is rounded to it before the norm.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(x, weight, bias)
    shape = len(x), len(weight)
    head_dim = check_heads(shape, cos, sin, (num_heads, num_kv_heads), (q_norm, k_norm), pages)
    if impl == "reference":
        return reference.heads_product(
            x, weight, bias, cos, sin, (num_heads, num_kv_heads), (q_norm, k_norm), eps, one_plus,
            pages,
        )  # fmt: skip
    from gpuscore_kernels.fused_products import launch

    sizes = num_heads, num_kv_heads, head_dim
    return launch.heads_product(
        x, weight, bias, cos, sin, sizes, (q_norm, k_norm), eps, one_plus, pages, pdl
    )


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    fits = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]
    if not fits or x.dtype != weight.dtype or not weight.is_contiguous():
        raise ValueError(
            f"shapes or dtypes do not fit, or the weight is not contiguous: x {tuple(x.shape)} "
            f"{x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(
            f"bias must be {tuple(weight.shape[:1])} {x.dtype}, got {tuple(bias.shape)} "
            f"{bias.dtype}"
        )
