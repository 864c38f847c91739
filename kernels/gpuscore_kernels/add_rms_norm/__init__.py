"""The residual stream plus a layer's output, and the RMS norm of the sum, in one pass."""

from torch import Tensor


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its norm.

    Args:
        x: [T, E], float32 or in the weight's dtype; the elements of a row are contiguous, rows need
            not be.
        delta: [T, E] in the weight's dtype, as x in memory, or None for 0.
        weight: [E].
        eps: added to the mean square.
        one_plus: Gemma's form: multiply by 1 + weight.

    Returns:
        The sum [T, E], float32 (x itself without a delta), and its norm [T, E], rounded once to the
        weight's dtype.
    """
    from gpuscore_kernels.add_rms_norm import triton  # only where Triton is

    return triton.add_rms_norm(x, delta, weight, eps, one_plus)
