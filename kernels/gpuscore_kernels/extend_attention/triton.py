"""`extend_attention` in Triton: one launch for all tiles of all requests and KV heads.

A program computes one query tile and one KV head; its rows are the tile's tokens times the query
heads of that KV head. It reads masked tiles (with a window), full tiles of the pool, full tiles of
the batch and masked tiles. Scores and sums are float32, exponentials have base 2. A masked key's
weight is exactly 0, so it changes no sum. The recurrence is FlashAttention-2's (arXiv 2307.08691).
"""

import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.extend_attention import table as columns
from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.extend_attention.table import DeviceTiles

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1.0e30)  # finite, so that a difference of two is never NaN
TILE_FIELDS = tl.constexpr(columns.TILE_FIELDS)
NUM_ROWS = tl.constexpr(columns.NUM_ROWS)
MASKED_START = tl.constexpr(columns.MASKED_START)
MASKED_AFTER = tl.constexpr(columns.MASKED_AFTER)
MASKED_END = tl.constexpr(columns.MASKED_END)
POOL_START = tl.constexpr(columns.POOL_START)
POOL_END = tl.constexpr(columns.POOL_END)
NUM_PACKED = tl.constexpr(columns.NUM_PACKED)
NUM_ROOT = tl.constexpr(columns.NUM_ROOT)
ROOT_BASE = tl.constexpr(columns.ROOT_BASE)
OWN_BASE = tl.constexpr(columns.OWN_BASE)
MASKED_FIELDS = tl.constexpr(columns.MASKED_FIELDS)
NUM_KEYS = tl.constexpr(columns.NUM_KEYS)
KEY = tl.constexpr(columns.KEY)
WHOSE = tl.constexpr(columns.WHOSE)
IS_PACKED = tl.constexpr(columns.IS_PACKED)
OF_ROW = tl.constexpr(columns.OWN)
SHARED = tl.constexpr(columns.SHARED)
BATCH_ROW = tl.constexpr(columns.BATCH_ROW)
FIRST_ROW = tl.constexpr(columns.FIRST_ROW)
POSITION = tl.constexpr(columns.POSITION)
NO_KEY = tl.constexpr(2**31 - 1)  # above every row and position


@triton.jit
def _load_keys(base, stride, offset_n, offset_d, D: tl.constexpr, count=None):
    """Load [BN, D_PAD] from `base`, with zeros beyond D and from row `count` on."""
    pointers = base + offset_n[:, None] * stride + offset_d[None, :]
    even: tl.constexpr = offset_d.shape[0] == D
    if count is not None:
        mask = offset_n[:, None] < count
        if not even:
            mask = mask & (offset_d[None, :] < D)
        return tl.load(pointers, mask=mask, other=0.0)
    if even:
        return tl.load(pointers)
    return tl.load(pointers, mask=offset_d[None, :] < D, other=0.0)


@triton.jit
def _step(q, keys, sums, factors, CAP: tl.constexpr, visible=None):
    """Add a tile of keys and values to `sums`: each row's maximum, sum of weights and weighted
    values. Every key is seen, or those of `visible`."""
    k, v = keys
    top, total, acc = sums
    scale, cap = factors
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP:
        # softcap * tanh(scale * s / softcap), in units of base 2
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * scale)))
        scale = LOG2_E
    if visible is not None:
        scores = tl.where(visible, scores, NEVER)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    if visible is not None:
        weights = tl.where(visible, weights, 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _masked_step(
    tiles,
    q,
    sums,
    factors,
    of_rows,
    pool,
    batch,
    offset_d,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    OWN: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add all masked tiles of one range of the table, whose keys are in the pool or the batch."""
    begin, end, masked = tiles
    batch_row, first_row, position = of_rows
    pool_k, stride_pk, pool_v, stride_pv = pool
    k, stride_k, v, stride_v = batch
    offset_n = tl.arange(0, OWN)
    for index in tl.range(begin, end):
        entry = masked + index * MASKED_FIELDS
        start = tl.load(entry).to(tl.int64)
        count = tl.load(entry + NUM_KEYS)
        key = tl.where(offset_n < count, tl.load(entry + KEY) + offset_n, NO_KEY)
        whose = tl.load(entry + WHOSE)
        packed = tl.load(entry + IS_PACKED) != 0
        from_k = tl.where(packed, k + start * stride_k, pool_k + start * stride_pk)
        from_v = tl.where(packed, v + start * stride_v, pool_v + start * stride_pv)
        step_k = tl.where(packed, stride_k, stride_pk)
        step_v = tl.where(packed, stride_v, stride_pv)
        own = whose == OF_ROW
        others = tl.where((whose == SHARED) | (first_row == whose), 0, NO_KEY)
        oldest = tl.where(own, first_row, others)
        # Keys of other segments come before a row.
        newest = tl.where(own, batch_row, NO_KEY - 1)
        if WINDOW > 0:
            newest = tl.where(own, batch_row, position)
            oldest = tl.maximum(oldest, newest - (WINDOW - 1))
        visible = (key[None, :] <= newest[:, None]) & (key[None, :] >= oldest[:, None])
        keys = _load_keys(from_k, step_k, offset_n, offset_d, D=D, count=count)
        values = _load_keys(from_v, step_v, offset_n, offset_d, D=D, count=count)
        sums = _step(q, (keys, values), sums, factors, CAP=CAP, visible=visible)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def extend_attention_kernel(
    q,  # [M, H, D]
    k,  # [T, Hkv, D]
    v,
    pool_k,  # [Hkv, slots, D], any strides
    pool_v,
    out,  # [M, H, D]
    rows,  # int32 [ROW_FIELDS, M]
    tiles,  # int32 [n, TILE_FIELDS]
    pool_tiles,  # int32
    masked,  # int32 [*, MASKED_FIELDS]
    num_rows,
    scale,  # times log2(e); with a soft-cap times 2 log2(e) / softcap
    cap,  # the soft-cap
    stride_qm,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_pks,
    stride_pkh,
    stride_pvs,
    stride_pvh,
    stride_om,
    stride_oh,
    WINDOW: tl.constexpr,  # 0 = none
    GROUP: tl.constexpr,  # heads per KV head
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # next power of two
    BM: tl.constexpr,
    BN: tl.constexpr,
    OWN: tl.constexpr,
    CAP: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    kv_head = tl.program_id(1)
    wide_head = kv_head.to(tl.int64)
    row_start = tl.load(tile)
    count = tl.load(tile + NUM_ROWS)

    # Row r of the tile is token r // GROUP and head r % GROUP of this KV head.
    offset_m = tl.arange(0, BM)
    offset_n = tl.arange(0, BN)
    offset_d = tl.arange(0, D_PAD)
    token = offset_m // GROUP
    head = kv_head * GROUP + offset_m % GROUP
    real = token < count
    of_token = rows + row_start + token
    row = tl.load(of_token, mask=real, other=0).to(tl.int64)
    batch_row = tl.load(of_token + BATCH_ROW * num_rows, mask=real, other=-1)
    first_row = tl.load(of_token + FIRST_ROW * num_rows, mask=real, other=0)
    position = batch_row
    if WINDOW > 0:
        position = tl.load(of_token + POSITION * num_rows, mask=real, other=-1)
    in_head = real[:, None] & (offset_d[None, :] < D)

    at = row[:, None] * stride_qm + head[:, None] * stride_qh + offset_d[None, :]
    q_tile = tl.load(q + at, mask=in_head, other=0.0)
    top = tl.full([BM], NEVER, tl.float32)
    sums = top, tl.zeros([BM], tl.float32), tl.zeros([BM, D_PAD], tl.float32)

    k_head = k + wide_head * stride_kh
    v_head = v + wide_head * stride_vh
    pool_k_head = pool_k + wide_head * stride_pkh
    pool_v_head = pool_v + wide_head * stride_pvh
    of_rows, factors = (batch_row, first_row, position), (scale, cap)
    pool = pool_k_head, stride_pks, pool_v_head, stride_pvs
    batch = k_head, stride_kt, v_head, stride_vt
    begin = tl.load(tile + MASKED_START)
    after = tl.load(tile + MASKED_AFTER)
    end = tl.load(tile + MASKED_END)
    if WINDOW > 0:
        sums = _masked_step(
            (begin, after, masked), q_tile, sums, factors, of_rows=of_rows, pool=pool, batch=batch,
            offset_d=offset_d, WINDOW=WINDOW, D=D, OWN=OWN, CAP=CAP,
        )  # fmt: skip
    pool_begin = tl.load(tile + POOL_START)
    pool_end = tl.load(tile + POOL_END)
    # A copy whose address is loaded in the same iteration would wait for that load, and Triton
    # would not start it before the product of the iteration before.
    next_slot = tl.load(pool_tiles + pool_begin, mask=pool_begin < pool_end, other=0)
    for index in tl.range(pool_begin, pool_end):
        slot = next_slot.to(tl.int64)
        next_slot = tl.load(pool_tiles + index + 1, mask=index + 1 < pool_end, other=0)
        from_k = pool_k_head + slot * stride_pks
        from_v = pool_v_head + slot * stride_pvs
        keys = _load_keys(from_k, stride_pks, offset_n, offset_d, D=D)
        values = _load_keys(from_v, stride_pvs, offset_n, offset_d, D=D)
        sums = _step(q_tile, (keys, values), sums, factors, CAP=CAP)
    num_packed = tl.load(tile + NUM_PACKED)
    num_root = tl.load(tile + NUM_ROOT)
    root_base = tl.load(tile + ROOT_BASE)
    own_base = tl.load(tile + OWN_BASE)
    for index in tl.range(0, num_packed):
        start = tl.where(index < num_root, root_base, own_base) + index * BN
        from_k = k_head + start.to(tl.int64) * stride_kt
        from_v = v_head + start.to(tl.int64) * stride_vt
        keys = _load_keys(from_k, stride_kt, offset_n, offset_d, D=D)
        values = _load_keys(from_v, stride_vt, offset_n, offset_d, D=D)
        sums = _step(q_tile, (keys, values), sums, factors, CAP=CAP)
    _, total, acc = _masked_step(
        (after, end, masked), q_tile, sums, factors, of_rows=of_rows, pool=pool, batch=batch,
        offset_d=offset_d, WINDOW=WINDOW, D=D, OWN=OWN, CAP=CAP,
    )  # fmt: skip

    at = row[:, None] * stride_om + head[:, None] * stride_oh + offset_d[None, :]
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # 0 for padding rows
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_head)


@chosen_once
def _launch(
    group: int, dim: int, config: TileConfig, window: int | None, cap: bool
) -> CachedLaunch:
    constants = {
        "WINDOW": window or 0,
        "GROUP": group,
        "D": dim,
        "D_PAD": max(16, triton.next_power_of_2(dim)),
        "BM": config.rows,
        "BN": config.keys,
        "OWN": config.own,
        "CAP": cap,
    }
    return CachedLaunch(
        extend_attention_kernel,
        constants,
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        free=1,
        dtypes=(0, 3, 4),  # q and the pool; tables are int32
    )


def launch(
    rows: tuple[Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    tiles: DeviceTiles,
    scale: float,
    softcap: float | None,
    config: TileConfig,
) -> Tensor:
    """Launch `api.extend_attention`."""
    (q, k, v), (pool_k, pool_v) = rows, pool
    num_rows, heads, dim = q.shape
    out = q.new_empty(num_rows, heads, dim)
    num_tiles, kv_heads = tiles.tiles.shape[0], k.shape[1]
    if num_tiles == 0:
        return out
    log2_e = LOG2_E.value
    of_rows = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    of_pool = (*pool_k.stride()[1::-1], *pool_v.stride()[1::-1])
    tables = (tiles.rows, tiles.tiles, tiles.pool_tiles, tiles.masked)
    factor = scale * log2_e if softcap is None else 2 * scale * log2_e / softcap
    cap = softcap is not None
    chosen = _launch(heads // kv_heads, dim, config, tiles.window, cap=cap)
    chosen(
        (num_tiles, kv_heads),
        (q, k, v, pool_k, pool_v, out, *tables),
        (num_rows, factor, softcap or 0.0, *of_rows, *of_pool, *out.stride()[:2]),
    )
    return out
