"""The functions of `delta.c` on tensors; `delta_net` and `delta_rows` document them."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from gpuscore_kernels.delta_net import LONGEST
from gpuscore_kernels.row_functions.build import declare

_P, _N, _F, _I = c_void_p, c_int64, c_float, c_int32
_ARGUMENTS = {
    "convolve": (*[_P] * 5, *[_N] * 6, _I),
    "gated_norm": (_P, _P, _P, _P, _F, *[_N] * 4, _I),
    "delta_chunks": (*[_P] * 9, *[_N] * 9, _I),
}


class DeltaFunctions:
    """Functions of linear layers in C for rows of one dtype, on as many threads as torch has.

    They raise ValueError for tensors that do not fit.

    Args:
        library: what `build` returns.
        dtype: that it was built for.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self._dtype = library, dtype
        declare(library, _ARGUMENTS)

    def convolve(
        self, mixed: Tensor, extra: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
    ) -> Tensor:
        """Convolve rows, and norm the heads of queries and keys, as `delta_rows.convolve`."""
        (rows, columns), kernel = mixed.shape, len(weight)
        _check(mixed, (rows, columns), self._dtype, contiguous=False)
        _check(extra, (len(extra), columns), self._dtype)
        _check(places, (rows, kernel), torch.int64)
        _check(weight, (kernel, columns), torch.float32)
        out = torch.empty(rows + 1, columns)
        self._library.convolve(
            *(x.data_ptr() for x in (out, mixed, extra, places, weight)),
            *(rows, columns, kernel, keys, size, mixed.stride(0)),
            torch.get_num_threads(),
        )
        return out

    def gated_norm(self, out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm each head and multiply with the gate, as `delta_rows.gated_norm`."""
        rows, heads, size = out.shape
        _check(out, (rows, heads, size), torch.float32)
        _check(gate, (rows, heads * size), self._dtype, contiguous=False)
        _check(weight, (size,), torch.float32)
        result = torch.empty(rows, heads * size, dtype=self._dtype)
        self._library.gated_norm(
            *(x.data_ptr() for x in (result, out, gate, weight)),
            eps,
            *(rows, heads, size, gate.stride(0)),
            torch.get_num_threads(),
        )
        return result

    def delta_chunks(
        self,
        convolved: Tensor,
        strength: Tensor,
        decay: Tensor,
        rows: Tensor,
        sources: Tensor | None,
        ends: int,
        before: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write the outputs of chunks, and return the end states that are needed, as
        `delta_net.delta_chunks`."""
        (chunks, length), (last, heads, value_size) = rows.shape, out.shape
        key_heads, key_size, values = before.shape[1:]
        repeat = values // value_size
        columns = 2 * key_heads * key_size + heads * value_size
        _check(convolved, (last, columns), torch.float32)
        _check(strength, (last, heads), torch.float32)
        _check(decay, (last, heads), torch.float32)
        _check(rows, (chunks, length), torch.int64)
        _check(before, (len(before), key_heads, key_size, values), torch.float32)
        _check(out, (last, heads, value_size), torch.float32)
        if length > LONGEST:
            raise ValueError(f"a chunk has {length} rows; supported: up to {LONGEST}")
        states = torch.empty(ends, *before.shape[1:])
        threads = torch.get_num_threads()
        work = torch.empty(threads * LONGEST * (key_size + 2 * LONGEST + value_size))
        self._library.delta_chunks(
            *(x.data_ptr() for x in (out, states, convolved, strength, decay, rows)),
            None if sources is None else sources.data_ptr(),
            *(x.data_ptr() for x in (before, work)),
            ends,
            0 if sources is None else len(sources) == 1,
            *(chunks, length, last - 1, key_heads, repeat, key_size, value_size),
            threads,
        )
        return states


def _check(
    x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, contiguous: bool = True
) -> None:
    dense = x.is_contiguous() if contiguous else shape[-1] < 2 or x.stride(-1) == 1
    if x.shape != shape or x.dtype != dtype or x.device.type != "cpu" or not dense:
        raise ValueError(
            f"a tensor must be {dtype} {shape} on a CPU, in order; got {x.dtype} "
            f"{tuple(x.shape)} on {x.device} with strides {x.stride()}"
        )
