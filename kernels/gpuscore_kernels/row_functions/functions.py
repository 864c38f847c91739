"""The functions of `rows.c` and `products.c` on tensors.

References of other kernels define the results.
"""

import ctypes

import torch
from torch import Tensor

from gpuscore_kernels.reference import QkvHeads
from gpuscore_kernels.row_functions.build import call, check_tensor, declare

LARGEST_HEAD = 1024  # numbers, as in rows.c
APART = 16  # numbers between two rows of products; strides of a power of two share cache lines
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

_ARGUMENTS = {
    "add_rms_norm": "PPPPPFINNNNI",
    "norm_and_rotate": "PPPPPPPFINNNNNI",
    "gated": "PPINNNI",
    "quantize_rows": "PPPFNNNI",
    "scale_rows": "PPPPNNI",
    "products": "PPPNNNNI",
}


class RowFunctions:
    """Row-wise functions in C for rows of one dtype, on as many threads as torch has.

    They take what their references take, and raise ValueError for tensors that do not fit: another
    dtype or device, rows whose numbers are not contiguous.

    Args:
        library: what `build` returns.
        dtype: the rows' dtype, for which it was built.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        declare(library, _ARGUMENTS)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
        """Norm x [T, E], float32 or in the weight's dtype, as `reference.rms_norm`."""
        return self.add_and_norm(x, None, weight, eps, one_plus=one_plus)[1]

    def add_and_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, one_plus: bool
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta [T, E], float32, and its norm, as `reference.add_and_norm`.

        The sum takes the memory of x if that is contiguous float32. None = 0.
        """
        rows, columns = x.shape
        x = x.float() if x.dtype == self._dtype else x
        check_tensor(x, (rows, columns), torch.float32, contiguous=False)
        self._check(weight, (columns,))
        normed = torch.empty(rows, columns, dtype=self._dtype)
        total = x
        if delta is not None:
            self._check(delta, (rows, columns))
            total = x if x.is_contiguous() else torch.empty(rows, columns)
        tensors = None if delta is None else total, normed, x, delta, weight
        strides = x.stride(0), 0 if delta is None else delta.stride(0)
        call(self._library.add_rms_norm, tensors, eps, one_plus, rows, columns, *strides)
        return total, normed

    def norm_and_rotate(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: QkvHeads
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split a QKV product, as `qk_norm_rope_store`.

        Returns:
            q [T, H, D], k and v [T, Hkv, D]. Queries and keys of a head are contiguous; v is qkv's
            own memory.
        """
        rows = len(qkv)
        size = 2 * cos.shape[1]
        self._check(qkv, (rows, (heads.queries + 2 * heads.keys) * size))
        if size > LARGEST_HEAD:
            raise ValueError(f"heads have {size} numbers; supported: up to {LARGEST_HEAD}")
        for table in (cos, sin):
            check_tensor(table, (rows, size // 2), torch.float32)
        for norm in (heads.q_norm, heads.k_norm):
            if norm is not None:
                self._check(norm, (size,))
        q, k = (qkv.new_empty(n, rows, size) for n in (heads.queries, heads.keys))
        tensors = q, k, qkv, cos, sin, heads.q_norm, heads.k_norm
        sizes = rows, heads.queries, heads.keys, size, qkv.stride(0)
        call(self._library.norm_and_rotate, tensors, heads.eps, heads.one_plus, *sizes)
        v = qkv[:, (heads.queries + heads.keys) * size :].view(rows, heads.keys, size)
        return q.transpose(0, 1), k.transpose(0, 1), v

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return act(gate) * up [T, I] of gate_up [T, 2 I], as `reference.gated`."""
        rows = len(gate_up)
        columns = gate_up.shape[1] // 2
        self._check(gate_up, (rows, 2 * columns))
        out = gate_up.new_empty(rows, columns)
        sizes = rows, columns, gate_up.stride(0)
        call(self._library.gated, (out, gate_up), ACTIVATIONS[activation], *sizes)
        return out

    def quantize_rows(self, x: Tensor, least: float) -> tuple[Tensor, Tensor]:
        """Quantise x [T, K] to int8, as `quantized` does; return numbers plus 128, as uint8.

        `least` is the scale of a row of zeros.
        """
        rows, columns = x.shape
        self._check(x, (rows, columns))
        q = torch.empty(rows, columns, dtype=torch.uint8)
        scales = torch.empty(rows, dtype=torch.float32)
        call(self._library.quantize_rows, (q, scales, x), least, rows, columns, x.stride(0))
        return q, scales

    def scale_rows(self, y: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return y [T, O], float32, times the scales [T] of its rows, plus bias [O]."""
        rows, columns = y.shape
        check_tensor(y, (rows, columns), torch.float32)
        check_tensor(scale, (rows,), torch.float32)
        if bias is not None:
            self._check(bias, (columns,))
        out = torch.empty(rows, columns, dtype=self._dtype)
        call(self._library.scale_rows, (out, y, scale, bias), rows, columns)
        return out

    def products(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x [N, E] with the transpose of a weight [V, E], both in bfloat16, to float32
        [N, V]."""
        rows, width = x.shape
        columns = len(weight)
        check_tensor(x, (rows, width), torch.bfloat16)
        check_tensor(weight, (columns, width), torch.bfloat16)
        out = x.new_empty(rows, columns + APART, dtype=torch.float32)
        call(self._library.products, (out, x, weight), rows, columns, width, out.stride(0))
        return out[:, :columns]

    def _check(self, x: Tensor, shape: tuple[int, ...]) -> None:
        check_tensor(x, shape, self._dtype, contiguous=False)
