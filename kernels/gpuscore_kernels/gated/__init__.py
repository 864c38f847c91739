"""The activation of a gated MLP: SwiGLU and GeGLU."""

from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up.

    Args:
        gate_up: [T, 2I], the gate's columns, then the up projection's; the elements of a row are
            contiguous, rows need not be.
        activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU with tanh's approximation).

    Returns:
        [T, I] in gate_up's dtype; float32 inside, rounded once.

    Raises:
        ValueError: the number of columns is odd, or the activation is unknown.
    """
    check_gate_up(gate_up, activation)
    from gpuscore_kernels.gated import triton  # only where Triton is

    return triton.gated(gate_up, activation)


def check_gate_up(gate_up: Tensor, activation: str) -> None:
    """Raise ValueError unless the shape is [T, 2I] and there is such an activation."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [T, 2I], got {tuple(gate_up.shape)}")
    check_activation(activation)


def check_activation(name: str) -> None:
    """Raise ValueError if there is no such activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r}; supported: {', '.join(ACTIVATIONS)}")
