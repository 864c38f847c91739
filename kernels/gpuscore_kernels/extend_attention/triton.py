"""`extend_attention` in Triton: one launch for all tiles of all requests and KV heads.

Scores and sums are float32, exponentials have base 2. A masked key's weight is exactly 0, so it
changes no sum. The recurrence is FlashAttention-2's (arXiv 2307.08691).
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
SEGMENT_BASE = tl.constexpr(columns.SEGMENT_BASE)
MASKED_FIELDS = tl.constexpr(columns.MASKED_FIELDS)
NUM_KEYS = tl.constexpr(columns.NUM_KEYS)
KEY_POSITION = tl.constexpr(columns.KEY_POSITION)
SEGMENT = tl.constexpr(columns.SEGMENT)
IS_PACKED = tl.constexpr(columns.IS_PACKED)
SAME = tl.constexpr(columns.SAME)
SHARED = tl.constexpr(columns.SHARED)
BATCH_ROW = tl.constexpr(columns.BATCH_ROW)
FIRST_ROW = tl.constexpr(columns.FIRST_ROW)
POSITION = tl.constexpr(columns.POSITION)
NO_KEY = tl.constexpr(2**31 - 1)  # above every row and position


@triton.jit
def _load_keys(base, stride, offs_n, offs_d, D: tl.constexpr, count=None):
    """Load rows `offs_n` and columns `offs_d`; zeros are beyond D and from row `count` on."""
    pointers = base + offs_n[:, None] * stride + offs_d[None, :]
    even: tl.constexpr = offs_d.shape[0] == D
    if count is not None:
        mask = offs_n[:, None] < count
        if not even:
            mask = mask & (offs_d[None, :] < D)
        return tl.load(pointers, mask=mask, other=0.0)
    if even:
        return tl.load(pointers)
    return tl.load(pointers, mask=offs_d[None, :] < D, other=0.0)


@triton.jit
def _attn_step(acc, l_i, m_i, q, k, v, qk_scale, softcap, CAP: tl.constexpr, visible=None):
    """Add a tile of keys and values to each row's weighted values `acc`, sum of weights `l_i` and
    maximum `m_i`. Every key is seen, or those of `visible`."""
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP:
        # softcap * tanh(scale * s / softcap), in units of base 2
        qk = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(qk * qk_scale)))
        qk_scale = LOG2_E
    if visible is not None:
        qk = tl.where(visible, qk, NEVER)
    m_ij = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
    p = tl.exp2(qk * qk_scale - m_ij[:, None])
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    alpha = tl.exp2(m_i - m_ij)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, l_i, m_ij


@triton.jit
def _attn_masked(
    acc,
    l_i,
    m_i,
    q,
    tiles,
    qk_scale,
    softcap,
    of_rows,
    pool,
    batch,
    offs_d,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    MASKED_N: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add all masked tiles of one range of the table; their keys are in the pool or the batch."""
    begin, end, masked = tiles
    batch_row, first_row, position = of_rows
    pool_k, stride_pk, pool_v, stride_pv = pool
    k, stride_k, v, stride_v = batch
    offs_n = tl.arange(0, MASKED_N)
    for index in tl.range(begin, end):
        entry = masked + index * MASKED_FIELDS
        start_n = tl.load(entry).to(tl.int64)
        count = tl.load(entry + NUM_KEYS)
        key = tl.where(offs_n < count, tl.load(entry + KEY_POSITION) + offs_n, NO_KEY)
        segment = tl.load(entry + SEGMENT)
        packed = tl.load(entry + IS_PACKED) != 0
        base_k = tl.where(packed, k + start_n * stride_k, pool_k + start_n * stride_pk)
        base_v = tl.where(packed, v + start_n * stride_v, pool_v + start_n * stride_pv)
        step_k = tl.where(packed, stride_k, stride_pk)
        step_v = tl.where(packed, stride_v, stride_pv)
        same = segment == SAME
        others = tl.where((segment == SHARED) | (first_row == segment), 0, NO_KEY)
        oldest = tl.where(same, first_row, others)
        # Keys of other segments always come before the row.
        newest = tl.where(same, batch_row, NO_KEY - 1)
        if WINDOW > 0:
            newest = tl.where(same, batch_row, position)
            oldest = tl.maximum(oldest, newest - (WINDOW - 1))
        visible = (key[None, :] <= newest[:, None]) & (key[None, :] >= oldest[:, None])
        keys = _load_keys(base_k, step_k, offs_n, offs_d, D=D, count=count)
        values = _load_keys(base_v, step_v, offs_n, offs_d, D=D, count=count)
        acc, l_i, m_i = _attn_step(
            acc, l_i, m_i, q, k=keys, v=values, qk_scale=qk_scale, softcap=softcap, CAP=CAP,
            visible=visible,
        )  # fmt: skip
    return acc, l_i, m_i


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
    qk_scale,  # times log2(e); with a soft-cap times 2 log2(e) / softcap
    softcap,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend BLOCK_M rows, which are a tile's tokens times the query heads of one KV head.

    Each program loads q once, and keeps the running maximum m_i, sum l_i and weighted values acc of
    its rows. It goes over tiles of keys: with a window, first masked ones; then full ones of
    BLOCK_N keys, of the pool and of the batch; then masked ones of MASKED_N keys. Each tile's
    scores move m_i; acc and l_i are rescaled and added to. In the end acc / l_i is stored.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    kv_head = tl.program_id(1)
    wide_head = kv_head.to(tl.int64)
    row_start = tl.load(tile)
    count = tl.load(tile + NUM_ROWS)

    # Row r of the tile is token r // GROUP and head r % GROUP of this KV head.
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, max(16, triton.next_power_of_2(D)))
    token = offs_m // GROUP
    head = kv_head * GROUP + offs_m % GROUP
    mask_m = token < count
    of_token = rows + row_start + token
    row = tl.load(of_token, mask=mask_m, other=0).to(tl.int64)
    batch_row = tl.load(of_token + BATCH_ROW * num_rows, mask=mask_m, other=-1)
    first_row = tl.load(of_token + FIRST_ROW * num_rows, mask=mask_m, other=0)
    position = batch_row
    if WINDOW > 0:
        position = tl.load(of_token + POSITION * num_rows, mask=mask_m, other=-1)
    mask = mask_m[:, None] & (offs_d[None, :] < D)

    at_q = row[:, None] * stride_qm + head[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q + at_q, mask=mask, other=0.0)
    m_i = tl.full([BLOCK_M], NEVER, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, offs_d.shape[0]], tl.float32)

    k += wide_head * stride_kh
    v += wide_head * stride_vh
    pool_k += wide_head * stride_pkh
    pool_v += wide_head * stride_pvh
    of_rows = batch_row, first_row, position
    pool = pool_k, stride_pks, pool_v, stride_pvs
    batch = k, stride_kt, v, stride_vt
    begin = tl.load(tile + MASKED_START)
    after = tl.load(tile + MASKED_AFTER)
    end = tl.load(tile + MASKED_END)
    if WINDOW > 0:
        acc, l_i, m_i = _attn_masked(
            acc, l_i, m_i, q, tiles=(begin, after, masked), qk_scale=qk_scale, softcap=softcap,
            of_rows=of_rows, pool=pool, batch=batch, offs_d=offs_d, WINDOW=WINDOW, D=D,
            MASKED_N=MASKED_N, CAP=CAP,
        )  # fmt: skip
    pool_begin = tl.load(tile + POOL_START)
    pool_end = tl.load(tile + POOL_END)
    # A copy whose address is loaded in the same iteration would wait for that load, and Triton
    # would not start it before the product of the iteration before.
    next_slot = tl.load(pool_tiles + pool_begin, mask=pool_begin < pool_end, other=0)
    for index in tl.range(pool_begin, pool_end):
        start_n = next_slot.to(tl.int64)
        next_slot = tl.load(pool_tiles + index + 1, mask=index + 1 < pool_end, other=0)
        base_k = pool_k + start_n * stride_pks
        base_v = pool_v + start_n * stride_pvs
        keys = _load_keys(base_k, stride_pks, offs_n, offs_d, D=D)
        values = _load_keys(base_v, stride_pvs, offs_n, offs_d, D=D)
        acc, l_i, m_i = _attn_step(
            acc, l_i, m_i, q, k=keys, v=values, qk_scale=qk_scale, softcap=softcap, CAP=CAP
        )
    num_packed = tl.load(tile + NUM_PACKED)
    num_root = tl.load(tile + NUM_ROOT)
    root_base = tl.load(tile + ROOT_BASE)
    segment_base = tl.load(tile + SEGMENT_BASE)
    for index in tl.range(0, num_packed):
        start_n = tl.where(index < num_root, root_base, segment_base) + index * BLOCK_N
        base_k = k + start_n.to(tl.int64) * stride_kt
        base_v = v + start_n.to(tl.int64) * stride_vt
        keys = _load_keys(base_k, stride_kt, offs_n, offs_d, D=D)
        values = _load_keys(base_v, stride_vt, offs_n, offs_d, D=D)
        acc, l_i, m_i = _attn_step(
            acc, l_i, m_i, q, k=keys, v=values, qk_scale=qk_scale, softcap=softcap, CAP=CAP
        )
    acc, l_i, _ = _attn_masked(
        acc, l_i, m_i, q, tiles=(after, end, masked), qk_scale=qk_scale, softcap=softcap,
        of_rows=of_rows, pool=pool, batch=batch, offs_d=offs_d, WINDOW=WINDOW, D=D,
        MASKED_N=MASKED_N, CAP=CAP,
    )  # fmt: skip

    at_out = row[:, None] * stride_om + head[:, None] * stride_oh + offs_d[None, :]
    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]  # 0 for padding rows
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=mask)


@chosen_once
def _launch(
    group: int, dim: int, config: TileConfig, window: int | None, cap: bool
) -> CachedLaunch:
    constants = {
        "WINDOW": window or 0,
        "GROUP": group,
        "D": dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "MASKED_N": config.masked_n,
        "CAP": cap,
    }
    return CachedLaunch(
        extend_attention_kernel,
        constants,
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        unspecialized=1,
        dtypes=(0, 3, 4),  # q and the pool; tables are int32
    )


def extend_attention(
    rows: tuple[Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    tiles: DeviceTiles,
    scale: float,
    softcap: float | None = None,
    *,
    config: TileConfig,
) -> Tensor:
    """Attend the query rows of `tiles`.

    Args:
        rows: q [M, H, D] of the table's M rows; k and v [T, Hkv, D] of all rows of the batch. H is
            a multiple of Hkv, D at most 256.
        pool: k and v [Hkv, slots, D], cached ones by slot. Slots that no row sees have no effect,
            even if they hold NaN.
        tiles: the batch's table, of the shape `config.shape(H // Hkv)`.
        scale: factor on q k^T, over 0.
        softcap: scores s = scale * q k^T become softcap * tanh(s / softcap), before the softmax.
        config: sizes of the kernel's tiles.

    Tensors are float32, float16 or bfloat16 on CUDA; float32 or float16 in Triton's interpreter on
    a CPU, which computes bfloat16 wrongly. The last dimension of every tensor is contiguous; other
    strides are free.

    Returns:
        [M, H, D] in q's dtype. Sums are float32; weights are rounded to v's dtype before they are
        multiplied with v.
    """
    q, k, v = rows
    pool_k, pool_v = pool
    num_rows, heads, dim = q.shape
    out = q.new_empty(num_rows, heads, dim)
    num_tiles = tiles.tiles.shape[0]
    kv_heads = k.shape[1]
    if num_tiles == 0:
        return out
    row_strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    pool_strides = (*pool_k.stride()[1::-1], *pool_v.stride()[1::-1])
    tables = (tiles.rows, tiles.tiles, tiles.pool_tiles, tiles.masked)
    qk_scale = scale * LOG2_E.value if softcap is None else 2 * scale * LOG2_E.value / softcap
    launch = _launch(heads // kv_heads, dim, config, tiles.window, cap=softcap is not None)
    launch(
        (num_tiles, kv_heads),
        (q, k, v, pool_k, pool_v, out, *tables),
        (num_rows, qk_scale, softcap or 0.0, *row_strides, *pool_strides, *out.stride()[:2]),
    )
    return out
