"""A trial: FlashAttention 4's kernel for Hopper with our mask rule, beside our own kernel.

    python -P bench/trial_fa4.py --compile DIR                 # no card; the packages below
    python -P bench/trial_fa4.py --run DIR --output FILE       # a card; apache-tvm-ffi

The first needs flash-attn-4 4.0.0b36, quack-kernels 0.6.5 and nvidia-cutlass-dsl 4.8.1.

The kernel reads keys in blocks at multiples of its block size. A list of full blocks and one of
masked blocks, made of our tile tables, belong to each 64 query rows; in masked blocks a rule is
evaluated for each pair, from numbers of its row or of its key. A cached prefix is gathered into
contiguous rows first, where it stands as the first segment of a batch.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from trial_objects import Kernel, Run, compare, main

from gpuscore.types.batch import Int32Array, PackedBatch, Prefix, Segment, pack, visible_rows
from gpuscore_kernels.extend_attention import TileTable, build_tiles, extend_attention, upload
from gpuscore_kernels.extend_attention.config import config_for
from gpuscore_kernels.extend_attention.layout import QUERY_ROW, SHARED, TileShape

HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 64
SCALE = DIM**-0.5
TILE = 128  # rows of the kernel's tile: tokens times the query heads of a KV head
TOKENS = TILE * KV_HEADS // HEADS
FINE = TileShape(4, 16, 16)  # fine tables find most full blocks and fewest others
INPUTS, SAMPLE = 3, 256
# Tokens of the query, items, tokens of an item, and whether the query is cached.
WORKLOADS = {
    "2000 + 500 x 20": (2000, 500, 20, False),
    "120 + 10 x 180": (120, 10, 180, False),
    "500 x 20 on 2000 cached": (2000, 500, 20, True),
}


def by_rows(numbers: Any, row: Any, key: Any) -> Any:
    """Evaluate the rule from `row_numbers`."""
    of_parent = (key >= numbers[0, row]) & (key < numbers[1, row])
    return of_parent | ((key >= numbers[2, row]) & (key <= numbers[3, row]))


def by_keys(numbers: Any, row: Any, key: Any) -> Any:
    """Evaluate the rule from `key_numbers`."""
    return (row >= numbers[0, key]) & (row < numbers[1, key])


def row_numbers(batch: PackedBatch, first: int) -> Int32Array:
    """Return, of each row from `first` on, the rows of its segment's parent, the first row of its
    segment, and its own. Only for trees whose segments' parents are roots."""
    if (batch.parent[batch.parent] >= 0)[batch.parent >= 0].any():
        raise ValueError("a segment's parent has a parent")
    start, end = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    has_parent = batch.parent >= 0
    of_segment = [np.where(has_parent, bound[batch.parent], 0) for bound in (start, end)]
    numbers = [column.repeat(end - start) for column in (*of_segment, start)]
    return _padded(np.stack([*numbers, np.arange(batch.num_tokens)])[:, first:])


def key_numbers(batch: PackedBatch, first: int) -> Int32Array:
    """Return, of each key, the first row that sees it and the row after the last, counted from
    `first` on: in a tree in preorder, from the key to the end of its segment's descendants."""
    end = batch.cu_seqlens[1:].copy()
    for segment in range(len(end) - 1, -1, -1):
        if (parent := batch.parent[segment]) >= 0:
            end[parent] = max(end[parent], end[segment])
    ends = end.repeat(np.diff(batch.cu_seqlens))
    return _padded(np.stack([np.arange(batch.num_tokens), ends]) - first)


def _padded(numbers: np.ndarray) -> Int32Array:
    """Return numbers for whole tiles: the kernel's last ones end behind the last row and key."""
    return np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 1280))).astype(np.int32)


RULES = {"rows": (by_rows, row_numbers), "keys": (by_keys, key_numbers)}
# Rule, and keys of a block.
VARIANTS = ("rows 128", "keys 128", "rows 80", "keys 80", "rows 64")


def block_lists(table: TileTable, keys: int, num_keys: int) -> list[Int32Array]:
    """Return how many and which masked blocks of keys each `TOKENS` query rows have, and then the
    same of full blocks, from a table without a pool."""
    order, size = table.rows[QUERY_ROW], table.shape.keys
    some = np.zeros((-(-len(order) // TOKENS), -(-num_keys // keys) * keys), dtype=np.bool_)
    every = np.ones_like(some)
    for tile in table.tiles.tolist():
        start, count, begin, _, end, pool, pool_end, packed, root, root_base, own_base = tile
        if pool < pool_end:
            raise ValueError("the table reads a pool; gather its keys first")
        full = np.zeros_like(some[0])
        full[root_base : root_base + root * size] = True
        full[own_base + root * size : own_base + packed * size] = True
        seen = full.copy()
        for key, number, _, whose, _ in table.masked[begin:end].tolist():
            seen[key : key + number] = True
            if whose == SHARED:
                full[key : key + number] = True
        for block in np.unique(order[start : start + count] // TOKENS):
            some[block] |= seen
            every[block] &= full
    parts = some.shape[0], -1, keys
    whole = every.reshape(parts).all(2)
    return [*_listed(some.reshape(parts).any(2) & ~whole), *_listed(whole)]


def _listed(chosen: np.ndarray) -> tuple[Int32Array, Int32Array]:
    """Return the number of chosen blocks in each row, and their places, ascending."""
    counts = chosen.sum(1)
    places = np.argsort(~chosen, axis=1, kind="stable")[:, : max(1, counts.max())]
    return counts.astype(np.int32), places.astype(np.int32)


def batch_of(query: int, items: int, length: int, cached: bool) -> PackedBatch:
    pages = np.arange(-(-query // PAGE) if cached else 0, dtype=np.int32)
    above = [] if cached else [Segment(np.zeros(query, np.int32), 0, 0)]
    tokens, parent = np.zeros(length, np.int32), len(above) - 1
    rest = [Segment(tokens, query, 0, parent=parent) for _ in range(items)]
    return pack(above + rest, [Prefix(query if cached else 0, pages)])


def compile_kernel(name: str) -> Any:
    """Compile a variant of the kernel without a card."""
    os.environ |= {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a"}
    os.environ |= {"FLASH_ATTENTION_NUM_SMS": "132"}
    import cutlass
    from cutlass import cute
    from flash_attn.cute import block_sparse_utils, utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Heads that share keys stand in one tile: as it is, it uses every list for two tiles.
    block_sparse_utils.sparse_tensor_m_block = lambda tile, heads, parts: tile
    rule, keys = RULES[name.split()[0]][0], int(name.split()[1])

    @cute.jit  # type: ignore[untyped-decorator]
    def mask(request, head, row, key, lengths, numbers):  # type: ignore[no-untyped-def]
        seen = rule(numbers[0], utils.ssa_to_scalar(row), utils.ssa_to_scalar(key))
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    with FakeTensorMode():
        card, rows = torch.device("cuda:0"), 8 * TILE
        q = torch.empty(1, rows, HEADS, DIM, dtype=torch.bfloat16, device=card)
        k, v = (q.new_empty(1, rows, KV_HEADS, DIM) for _ in range(2))
        sizes = ((rows // TILE,), (rows // TILE, 7)) * 2
        lists = [q.new_empty(1, 1, *size, dtype=torch.int32) for size in sizes]
        given = {"mask_mod": mask, "aux_tensors": [q.new_empty(4, rows, dtype=torch.int32)]}
        given |= {"block_sparse_tensors": BlockSparseTensorsTorch(*lists, block_size=(TILE, keys))}
        given |= {"tile_mn": (TILE, keys), "softmax_scale": SCALE, "pack_gqa": True, "_arch": 90}
        _flash_attn_fwd.compile_cache.clear()
        _flash_attn_fwd(q, k, v, **given)
    (compiled,) = _flash_attn_fwd.compile_cache.cache.values()
    return compiled


def call(kernel: Kernel, rows: list[Tensor], arrays: list[Tensor]) -> Tensor:
    """Call a loaded kernel on q, k and v with lists of blocks and numbers of a rule."""
    *lists, numbers = arrays
    out = torch.empty_like(rows[0])
    tensors = [x.unsqueeze(0) for x in (*rows, out)]
    blocks = *(x[None, None] for x in lists), *(None,) * 4
    # No log-sum-exps; no lengths, pages, windows and sinks.
    kernel(*tensors, None, SCALE, *(None,) * 8, blocks, ((numbers,), None), None, None)
    return out


def reference(rows: list[Tensor], visible: Tensor, sample: Tensor) -> Tensor:
    """Compute sampled rows in float64."""
    q, k, v = (x.double() for x in (rows[0][sample], *rows[1:]))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("mhd,thd->hmt", q, k) * SCALE
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hmt,thd->mhd", weights, v)


def ways(
    loaded: Mapping[str, Kernel], sizes: tuple[int, int, int, bool], inputs: Tensor
) -> Iterator[tuple[str, Run]]:
    """Yield every kernel's call on q, k and v of all keys, which stand side by side in `inputs`."""
    from gpuscore.backends.torch.attention.triton import layout_of

    query, _, _, cached = sizes
    first, device = query if cached else 0, inputs.device
    ours, whole = batch_of(*sizes), batch_of(*sizes[:3], False)
    q, k, v = (x.contiguous() for x in inputs.split([HEADS, KV_HEADS, KV_HEADS], 1))
    q, pages = q[first:], -(-query // PAGE) * PAGE
    pool = [torch.zeros(KV_HEADS, pages, DIM, dtype=x.dtype, device=device) for x in (k, v)]
    for kept, x in zip(pool, (k, v), strict=True):
        kept[:, :query] = x[:query].transpose(0, 1)
    config = config_for(device, DIM, q.dtype)
    table = build_tiles(layout_of(ours, PAGE), config.shape(HEADS // KV_HEADS))
    (tiles,) = upload([table], device)
    rows = q, k[first:], v[first:]
    given: dict[str, Any] = {"scale": SCALE, "config": config, "impl": "triton"}
    yield "ours", lambda: extend_attention(*rows, *pool, tiles, **given)

    def gather_and_call(kernel: Kernel, arrays: list[Tensor]) -> Tensor:
        for kept, x in zip(pool, (k, v), strict=True):
            x[:first] = kept[:, :first].transpose(0, 1)
        return call(kernel, [q, k, v], arrays)

    table = build_tiles(layout_of(whole, PAGE), FINE, rows=np.arange(first, len(k), dtype=np.int32))
    for name, kernel in loaded.items():
        _, rule, keys = name.split()
        arrays = *block_lists(table, int(keys), len(k)), RULES[rule][1](whole, first)
        there = [torch.from_numpy(x).to(device) for x in arrays]
        yield name, partial(gather_and_call, kernel, there)


def run(loaded: Mapping[str, Kernel], output: Path) -> bool:
    """Check and time kernels; return whether all were right."""
    device, right = torch.device("cuda"), True
    for name, sizes in WORKLOADS.items():
        whole = batch_of(*sizes[:3], False)
        shape = whole.num_tokens, HEADS + 2 * KV_HEADS, DIM
        sets = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(INPUTS)]
        first = sizes[0] if sizes[3] else 0
        sample = torch.randperm(whole.num_tokens - first, device=device)[:SAMPLE]
        seen = visible_rows(whole)[first:][sample.cpu().numpy()]
        visible = torch.from_numpy(seen).to(device)
        q, k, v = sets[0].split([HEADS, KV_HEADS, KV_HEADS], 1)
        expected = reference([q[first:], k, v], visible, sample)
        calls = [dict(ways(loaded, sizes, inputs)) for inputs in sets]
        of_way = {way: [runs[way] for runs in calls] for way in calls[0]}
        right &= compare(name, of_way, expected, sample, output)
    return right


if __name__ == "__main__":
    main("fa4", VARIANTS, compile_kernel, run)
