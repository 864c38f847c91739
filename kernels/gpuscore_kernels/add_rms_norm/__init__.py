"""The residual stream plus a layer's output, and the RMS norm of the sum, in one pass."""

from torch import Tensor

from gpuscore_kernels import Implementation, reference


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    one_plus: bool = False,
    pdl: bool = False,
    impl: Implementation,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its norm.

    Args:
        x: [T, E]; the elements of a row are contiguous, rows need not be.
        delta: like x, or None for 0.
        weight: [E].
        eps: added to the mean square.
        one_plus: Gemma's form: multiply by 1 + weight, before rounding to x's dtype.
        pdl: with "triton", begin before the kernel before has ended (`launch.has_pdl`).
        impl: "reference" (any device) or "triton".

    Returns:
        The sum [T, E], rounded to x's dtype before it is squared (x itself without a delta), and
        its norm [T, E] in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_rows(x, delta, weight)
    if impl == "reference":
        return reference.add_rms_norm(x, delta, weight, eps, one_plus)
    from gpuscore_kernels.add_rms_norm import triton

    return triton.add_rms_norm(x, delta, weight, eps, one_plus, pdl)


def check_rows(x: Tensor, delta: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError unless shapes and dtypes fit."""
    if x.dim() != 2 or x.shape[1:] != weight.shape or x.dtype != weight.dtype:
        raise ValueError(
            f"shapes or dtypes do not fit: x {tuple(x.shape)} {x.dtype}, "
            f"weight {tuple(weight.shape)} {weight.dtype}"
        )
    if delta is not None and (delta.shape != x.shape or delta.dtype != x.dtype):
        raise ValueError(
            f"delta must be {tuple(x.shape)} {x.dtype}, got {tuple(delta.shape)} {delta.dtype}"
        )
