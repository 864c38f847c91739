"""Norms, gates and rotation in plain torch; the kernels are checked against these functions.

Each is float32 inside (float64 for float64) and rounds its result once, to the dtype of the
weights. The residual stream is float32 beside weights in half precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class QkvHeads:
    """The heads of a QKV product, and the norms of queries and keys."""

    queries: int  # H; 0 if there are only keys and values
    keys: int  # Hkv, also the number of value heads; 0 if there are only queries
    q_norm: Tensor | None = None  # weight [D] of each head's norm; both are given or neither
    k_norm: Tensor | None = None
    eps: float = 0.0
    one_plus: bool = False  # Gemma's form


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """Norm x [..., E] with weight [E], or 1 + weight (`one_plus`, Gemma's form).

    The result has the weight's dtype.
    """
    return _wide_norm(x, weight, eps, one_plus).to(weight.dtype)


def _wide_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """Return the norm before it is rounded."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed * (1 + weight.to(compute) if one_plus else weight.to(compute))


def add_and_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """Return x + delta [T, E] in float32 (float64 for float64), and its norm."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)) + delta
    return x, rms_norm(x, weight, eps, one_plus)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up; gate_up [T, 2I] holds the gate's columns, then the up projection's."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if activation == "gelu_tanh":
        active = functional.gelu(wide, approximate="tanh")
    else:
        active = functional.silu(wide)
    return active.mul_(up).to(gate_up.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x [T, H, D]; cos and sin are [T, 1, D / 2]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def norm_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: QkvHeads
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a QKV product [T, (H + 2 Hkv) D] into q [T, H, D], k and v [T, Hkv, D].

    Queries and keys are normed if the model has a QK norm, and rotated by cos and sin [T, D / 2].
    """
    every = qkv.reshape(len(qkv), heads.queries + 2 * heads.keys, 2 * cos.shape[1])
    q, k, v = every.tensor_split((heads.queries, heads.queries + heads.keys), dim=1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if weight is not None:
            wide = _wide_norm(x, weight, heads.eps, heads.one_plus)
        return rotate(wide, cos.unsqueeze(1), sin.unsqueeze(1)).to(x.dtype)

    return turned(q, heads.q_norm), turned(k, heads.k_norm), v
