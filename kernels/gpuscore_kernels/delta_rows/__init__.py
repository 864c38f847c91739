"""Two functions of rows of linear layers: the causal convolution, and the gated norm of outputs.

Shapes are those of `delta_net`; tensors are contiguous, except rows of `mixed` and `gate`. All is
float32 inside. `impl` is "reference" (any device) or "triton".
"""

import torch
from torch import Tensor

from gpuscore_kernels import Implementation
from gpuscore_kernels.delta_net import check, reference


def convolve(
    mixed: Tensor,
    extra: Tensor,
    places: Tensor,
    weight: Tensor,
    keys: int,
    size: int,
    *,
    impl: Implementation,
) -> Tensor:
    """Convolve each column along the prompt of each row, apply SiLU, and norm queries and keys.

    Args:
        mixed: [T, C] queries, keys and values, of any dtype.
        extra: [x, C] kept rows of the same dtype, the last of them zeros.
        places: int64 [T, kernel] of the rows that each row sees, in mixed and then extra.
        weight: [kernel, C].
        keys: columns of queries, and of keys.
        size: of a key head.

    Returns:
        float32 [T + 1, C].

    Raises:
        ValueError: tensors do not fit.
    """
    (rows, columns), kernel = mixed.shape, len(weight)
    check(mixed, (rows, columns), mixed.dtype, contiguous=False)
    check(extra, (len(extra), columns), mixed.dtype)
    check(places, (rows, kernel), torch.int64)
    check(weight, (kernel, columns), torch.float32)
    if impl == "reference":
        return reference.convolve(mixed, extra, places, weight, keys, size)
    from gpuscore_kernels.delta_rows import triton

    return triton.convolve(mixed, extra, places, weight, keys, size)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, impl: Implementation
) -> Tensor:
    """Norm each head of x [T, heads, Dv] with weight [Dv], times SiLU of the gate [T, heads Dv].

    Returns:
        [T, heads Dv] in the gate's dtype.

    Raises:
        ValueError: tensors do not fit.
    """
    rows, heads, size = x.shape
    check(x, (rows, heads, size), torch.float32)
    check(gate, (rows, heads * size), gate.dtype, contiguous=False)
    check(weight, (size,), torch.float32)
    if impl == "reference":
        return reference.gated_norm(x, gate, weight, eps)
    from gpuscore_kernels.delta_rows import triton

    return triton.gated_norm(x, gate, weight, eps)
