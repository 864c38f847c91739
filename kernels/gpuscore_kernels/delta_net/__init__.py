"""The gated delta rule in chunks, of linear layers.

Per head and token, with a state S [Dk, Dv], key k, value v, decay a and strength b:

    S = a S;  S = S + k (b (v - k' S))';  output = q' S

(Yang et al., "Gated Delta Networks", 2024; chunks as in flash-linear-attention.) All is float32
inside.

`reference.py` documents the functions; `triton.py` has kernels of the same names. Shapes: T rows,
Hk key heads, R value heads of each, Dk and Dv their sizes, C convolved columns. Tensors are
contiguous, except rows of `mixed`, `gate` and `gates`, and float32 where nothing else is said.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

CHUNK_SIZE = 64  # rows of a chunk, at most: as in transformers


@dataclass(frozen=True, slots=True)
class Walks:
    """Walks over chunks of rows: each begins with a state, and hands it on from chunk to chunk.

    Walks of a level do not depend on each other, but on the levels before. A place of a state is a
    slot of the pool, or -1 = zeros, or from -2 downwards a state that is held for later levels.

    Args:
        chunks: int32 [n + 1, 4], for each chunk its first row, and up to three places that get the
            state after it, padded with -1. The last entry has the row number T.
        walks: int32 [w, 3] for each level, with a walk's first chunk, the chunk after its last, and
            the place of its first state. The levels with odd indices have only walks of one chunk
            that keep no state.
        begins: int32 [T] the first row that each row depends on in its chunk: the chunk's first
            row, or the first row of its segment if siblings share the chunk.
        held: how many states are held.
    """

    chunks: Tensor
    walks: tuple[Tensor, ...]
    begins: Tensor
    held: int


def strengths(gates: Tensor, decay: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the strengths and the logarithms of the decays, [T, R Hk] each."""
    strength, step = gates.to(decay).tensor_split(2, dim=1)
    return strength.sigmoid(), decay * functional.softplus(step + bias)
