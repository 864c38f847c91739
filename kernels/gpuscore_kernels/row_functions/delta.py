"""The functions of `delta.c` on tensors; `delta_net/reference.py` documents them."""

import ctypes

import torch
from torch import Tensor

from gpuscore_kernels.delta_net import CHUNK_SIZE, Walks, strengths
from gpuscore_kernels.row_functions.build import call, check_tensor, declare

_ARGUMENTS = {
    "convolve": "PPPPPNNNNNNI",
    "gated_norm": "PPPPFNNNNI",
    "delta_walks": "PPPPPPPPPNNNNNNI",
}


class DeltaFunctions:
    """Functions of linear layers in C, for one dtype. They use torch's number of threads.

    They raise ValueError for tensors of a wrong shape or dtype.

    Args:
        library: what `build` returns.
        dtype: the dtype that the library was built for.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        declare(library, _ARGUMENTS)

    def convolve(
        self, mixed: Tensor, tails: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
    ) -> Tensor:
        """Convolve rows, and norm the heads of queries and keys, as `reference.convolve`."""
        rows, columns = mixed.shape
        kernel = len(weight)
        check_tensor(mixed, (rows, columns), self._dtype, contiguous=False)
        check_tensor(tails, (len(tails), kernel - 1, columns), self._dtype)
        check_tensor(places, (rows, kernel - 1), torch.int32)
        check_tensor(weight, (kernel, columns), torch.float32)
        out = torch.empty(rows, columns)
        sizes = rows, columns, kernel, keys, size, mixed.stride(0)
        call(self._library.convolve, (out, mixed, tails, places, weight), *sizes)
        return out

    def gated_norm(self, out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm each head and multiply with the gate, as `reference.gated_norm`."""
        rows, heads, size = out.shape
        check_tensor(out, (rows, heads, size), torch.float32)
        check_tensor(gate, (rows, heads * size), self._dtype, contiguous=False)
        check_tensor(weight, (size,), torch.float32)
        result = torch.empty(rows, heads * size, dtype=self._dtype)
        sizes = rows, heads, size, gate.stride(0)
        call(self._library.gated_norm, (result, out, gate, weight), eps, *sizes)
        return result

    def delta_rule(
        self,
        convolved: Tensor,
        gates: Tensor,
        decay: Tensor,
        bias: Tensor,
        walks: Walks,
        pool: Tensor,
    ) -> Tensor:
        """Return the outputs of all rows, and store states in `pool`, as `delta_net.delta_rule`."""
        _, key_heads, key_size, values = pool.shape
        rows = len(convolved)
        heads = len(decay)
        repeat = heads // key_heads
        value_size = values // repeat
        by_row = [x.contiguous() for x in strengths(gates, decay, bias)]
        check_tensor(
            convolved, (rows, 2 * key_heads * key_size + heads * value_size), torch.float32
        )
        for x in by_row:
            check_tensor(x, (rows, heads), torch.float32)
        check_tensor(pool, tuple(pool.shape), torch.float32)
        check_tensor(walks.chunks, (len(walks.chunks), 4), torch.int32)
        for level in walks.walks:
            check_tensor(level, (len(level), 3), torch.int32)
        longest = int(walks.chunks[:, 0].diff().max())
        if longest > CHUNK_SIZE:
            raise ValueError(f"a chunk has {longest} rows; supported: up to {CHUNK_SIZE}")
        out = torch.empty(rows, heads, value_size)
        held = pool.new_empty(walks.held, *pool.shape[1:])
        of_chunk = CHUNK_SIZE * (key_size + 2 * CHUNK_SIZE + value_size)
        words = of_chunk + key_size * value_size
        scratch = torch.empty(torch.get_num_threads() * words)
        for level in walks.walks:
            tensors = out, pool, held, convolved, *by_row, walks.chunks, level, scratch
            sizes = len(level), key_heads, repeat, key_size, value_size, words
            call(self._library.delta_walks, tensors, *sizes)
        return out
