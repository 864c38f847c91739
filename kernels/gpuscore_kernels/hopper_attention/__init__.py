"""Attention of a packed batch by FlashAttention 4's kernel for Hopper, with our mask rule.

Keys are the batch's rows and then cached keys, which stand in further rows of k and v. Two numbers
of each key are the rule: the first row that sees it, and the row after the last. The kernel reads
keys in blocks. Each tile of rows has a list of blocks that all its rows see, which are read without
the rule, and one of other blocks that any row sees; `block_lists` makes both on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpuscore_kernels.ahead import Kernel
from gpuscore_kernels.hopper_attention.kernel import KEYS, ROWS
from gpuscore_kernels.hopper_attention.triton import launch

NEVER = 2**31 - 1  # the first row that sees a key which no row sees


class KeyBlocks(NamedTuple):
    """The rule of a batch and its lists of blocks, int32; n tiles of rows, b blocks of keys."""

    numbers: Tensor  # [2, b * KEYS]
    masked_count: Tensor  # [n] blocks in each list ...
    masked: Tensor  # [n, b] ... and their places, ascending
    full_count: Tensor
    full: Tensor


def block_lists(numbers: Tensor, rows: int, group: int) -> KeyBlocks:
    """Make the lists of this many rows, `group` of whose heads share keys."""
    tokens, blocks = ROWS // group, numbers.shape[1] // KEYS
    tiles = -(-rows // tokens)
    # Each has memory of its own, aligned: Triton compiles another kernel for what is not.
    lists = KeyBlocks(numbers, *(numbers.new_empty(tiles, *n) for n in ((), (blocks,)) * 2))
    if tiles:
        launch(tokens, KEYS)((tiles, 1), lists, (rows, blocks))
    return lists


def hopper_attention(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, blocks: KeyBlocks, scale: float
) -> Tensor:
    """Attend q [M, H, D] to k and v [T, Hkv, D] with a kernel compiled for D and H // Hkv.

    The last dimension of each is contiguous, and rows begin at multiples of 16 bytes. Values that
    no row sees must be finite, too.
    """
    out = torch.empty_like(q)
    if not len(q):
        return out
    tensors = [x.unsqueeze(0) for x in (q, k, v, out)]
    lists = *(x[None, None] for x in blocks[1:]), *(None,) * 4
    # No log-sum-exps; no lengths, pages, windows and sinks.
    kernel(*tensors, None, scale, *(None,) * 8, lists, ((blocks.numbers,), None), None, None)
    return out
