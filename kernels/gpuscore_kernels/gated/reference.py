"""The activation of a gated MLP in plain torch; it is rounded before the product."""

from torch import Tensor
from torch.nn import functional


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up; gate_up [T, 2I] holds the gate's columns, then the up projection's."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up
