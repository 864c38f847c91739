"""FlashAttention 4's kernel for Hopper with our mask rule, as CuTe's compiler makes it."""

from typing import Any

ROWS = 128  # of a tile: tokens times the query heads of a KV head
KEYS = 128  # of a block


def compile_kernel(head_dim: int, group: int) -> Any:
    """Compile for bfloat16, this head size and this many query heads of a KV head; no card."""
    import cutlass
    import torch
    from cutlass import cute
    from flash_attn.cute import block_sparse_utils, utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    # QkvHeads that share keys stand in one tile: as it is, it uses every list for several tiles.
    block_sparse_utils.sparse_tensor_m_block = lambda tile, heads, parts: tile

    @cute.jit
    def mask(request, head, row, key, lengths, numbers):  # type: ignore[no-untyped-def]
        """Evaluate the rule for a row: from the first that sees the key to the last."""
        row, key = utils.ssa_to_scalar(row), utils.ssa_to_scalar(key)
        seen = (row >= numbers[0][0, key]) & (row < numbers[0][1, key])
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    with FakeTensorMode():
        q = torch.empty(1, 8 * ROWS, 8 * group, head_dim, dtype=torch.bfloat16, device="cuda:0")
        k, v = (q.new_empty(1, 8 * ROWS, 8, head_dim) for _ in range(2))
        sizes = ((8,), (8, 7)) * 2
        lists = [q.new_empty(1, 1, *size, dtype=torch.int32) for size in sizes]
        given = {"mask_mod": mask, "aux_tensors": [q.new_empty(2, 8 * ROWS, dtype=torch.int32)]}
        given |= {"block_sparse_tensors": BlockSparseTensorsTorch(*lists, block_size=(ROWS, KEYS))}
        given |= {"tile_mn": (ROWS, KEYS), "pack_gqa": group > 1, "_arch": 90}
        _flash_attn_fwd.compile_cache.clear()
        _flash_attn_fwd(q, k, v, softmax_scale=head_dim**-0.5, **given)
    (compiled,) = _flash_attn_fwd.compile_cache.cache.values()
    return compiled
