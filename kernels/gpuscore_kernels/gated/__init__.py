"""The activation of a gated MLP: SwiGLU and GeGLU."""

from torch import Tensor


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up.

    Args:
        gate_up: [T, 2I], the gate's columns, then the up projection's; the elements of a row are
            contiguous, rows need not be.
        activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU with tanh's approximation).

    Returns:
        [T, I] in gate_up's dtype; float32 inside, rounded once.
    """
    from gpuscore_kernels.gated import triton  # only where Triton is

    return triton.gated(gate_up, activation)
