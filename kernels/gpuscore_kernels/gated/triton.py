"""`gated` in Triton: one program per row and block of columns."""

import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once, row_launch

BLOCK = 1024  # columns of a program


@triton.jit
def activated(gate, up, GELU: tl.constexpr):
    """Return act(gate) * up in their dtype, rounded once."""
    gate = gate.to(tl.float32)
    if GELU:
        # 0.5 (1 + tanh z) = sigmoid(2 z), without the difference of nearly equal numbers
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * z)
    else:
        active = gate * tl.sigmoid(gate)
    return (active * up.to(tl.float32)).to(up.dtype)


@triton.jit
def gated_kernel(
    gate_up,
    out,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """Write act(gate) * up of BLOCK cols of a row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    start = gate_up + row * stride + cols
    gate = tl.load(start, mask=mask, other=0.0)
    up = tl.load(start + WIDTH, mask=mask, other=0.0)
    result = activated(gate, up, GELU)
    tl.store(out + row * WIDTH + cols, result, mask=mask)


@chosen_once
def _launch(width: int, activation: str) -> tuple[CachedLaunch, int]:
    """Return the launch, and the number of programs of a row."""
    block = min(BLOCK, triton.next_power_of_2(width))
    constants = {"WIDTH": width, "BLOCK": block, "GELU": activation == "gelu_tanh"}
    return row_launch(gated_kernel, constants), triton.cdiv(width, block)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up.

    Args:
        gate_up: [T, 2I], the gate's columns, then the up projection's; the elements of a row are
            contiguous, rows need not be.
        activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU with tanh's approximation).

    Returns:
        [T, I] in gate_up's dtype; float32 inside, rounded once.
    """
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel() == 0:
        return out
    launch, programs = _launch(width, activation)
    launch((rows, programs), (gate_up, out), (gate_up.stride(0),))
    return out
