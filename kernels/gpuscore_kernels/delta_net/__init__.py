"""The gated delta rule in chunks, of linear layers.

Per head and token, with a state S [Dk, Dv], key k, value v, decay a and strength b:

    S = a S;  S = S + k (b (v - k' S))';  output = q' S

(Yang et al., "Gated Delta Networks", 2024; chunks as in flash-linear-attention.) All is float32
inside.

Shapes: T rows, Hk key heads, R value heads of each, Dk and Dv their sizes, n chunks of L rows, C
convolved columns. Tensors of T + 1 rows end with a row of zeros, which pads chunks and changes no
state. Tensors are contiguous, and float32 where nothing else is said. `impl` is "reference" (any
device) or "triton".
"""

import torch
from torch import Tensor

from gpuscore_kernels import Implementation
from gpuscore_kernels.delta_net import reference

LONGEST = 64  # rows of a chunk


def delta_chunks(
    convolved: Tensor,
    strength: Tensor,
    decay: Tensor,
    rows: Tensor,
    sources: Tensor | None,
    ends: int,
    before: Tensor,
    out: Tensor,
    *,
    impl: Implementation,
) -> Tensor:
    """Compute chunks of similar length.

    Args:
        convolved: [T + 1, C], as `delta_rows.convolve` returns it.
        strength: [T + 1, R Hk].
        decay: [T + 1, R Hk], logarithms.
        rows: int64 [n, L], up to 64 rows of each chunk; T pads shorter ones.
        sources: int64 [n], or [1] for siblings: places of the states that chunks begin with, in
            `before`; None = zeros.
        ends: how many chunks, the first ones, have a state after them that is needed.
        before: [X, Hk, Dk, R Dv].
        out: [T + 1, R Hk, Dv], to which outputs are written; the last row may hold anything.

    Returns:
        The states [ends, Hk, Dk, R Dv] after the first chunks.

    Raises:
        ValueError: tensors do not fit, or chunks are longer.
    """
    (chunks, length), (behind, heads, value_size) = rows.shape, out.shape
    key_heads, key_size, values = before.shape[1:]
    columns = 2 * key_heads * key_size + heads * value_size
    check(convolved, (behind, columns), torch.float32)
    for of_heads in (strength, decay):
        check(of_heads, (behind, heads), torch.float32)
    check(rows, (chunks, length), torch.int64)
    if sources is not None:
        check(sources, (1 if len(sources) == 1 else chunks,), torch.int64)
    of_state = key_heads, key_size, heads // key_heads * value_size
    check(before, (len(before), *of_state), torch.float32)
    check(out, (behind, heads, value_size), torch.float32)
    if length > LONGEST or not 0 <= ends <= chunks or values * key_heads != heads * value_size:
        raise ValueError(
            f"{chunks} chunks of {length} rows with {ends} states after them, {heads} value heads "
            f"and {key_heads} key heads; supported: up to {LONGEST} rows, as many states as chunks"
        )
    tensors = convolved, strength, decay, rows, sources, ends, before, out
    if impl == "reference":
        return reference.delta_chunks(*tensors)
    from gpuscore_kernels.delta_net import triton

    return triton.delta_chunks(*tensors)


def check(
    x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, contiguous: bool = True
) -> None:
    """Raise ValueError unless a tensor has this shape and dtype, and all of it, or each row, is
    contiguous."""
    ordered = x.is_contiguous() if contiguous else x.stride(-1) == 1
    if x.shape != shape or x.dtype != dtype or not ordered:
        raise ValueError(
            f"a tensor must be {dtype} {shape}, in order; got {x.dtype} {tuple(x.shape)} with "
            f"strides {x.stride()}"
        )
