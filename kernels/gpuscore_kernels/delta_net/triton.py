"""Linear attention by the gated delta rule in Triton, on tensor cores.

Products with queries and keys of 16 bits take two numbers of 16 bits for each of float32. For a
model in float32 all products are three in TF32, which together are as exact as float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.delta_net import CHUNK_SIZE, Walks
from gpuscore_kernels.delta_net.reference import EPS
from gpuscore_kernels.launch import arch_of

BLOCK_T = tl.constexpr(CHUNK_SIZE)
EPSILON = tl.constexpr(EPS)
BLOCK_M = tl.constexpr(16)  # rows of a program
TAIL_COLUMNS = tl.constexpr(512)  # of a program that keeps tails
ROW_WARPS = 8  # of programs of rows: 8 elements per thread for heads of 128


@triton.jit
def dot(a, b, DTYPE: tl.constexpr):
    """Return a @ b in a model of DTYPE; b is in two parts where it is of float32 and a is not."""
    if a.dtype == b.dtype:
        return tl.dot(a, b, input_precision="tf32x3" if DTYPE.is_fp32() else "tf32")
    high = b.to(a.dtype)
    return tl.dot(a, (b - high.to(tl.float32)).to(a.dtype), tl.dot(a, high))


@triton.jit
def merge_inverses(inv, A, offs, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Return the inverse of matrices A, one for all of `offs`, from those of blocks of WIDTH."""
    block = offs // WIDTH
    width = 1
    while width * WIDTH < offs.shape[0]:
        # From one block of each two to the other.
        between = (block[:, None] // width) ^ (block[None, :] // width) == 1
        step = dot(inv, A * between.to(tl.float32), DTYPE)
        inv -= dot(step, inv, DTYPE)
        width *= 2
    return inv


@triton.jit
def inverse(A, offs_t, DTYPE: tl.constexpr):
    """Return the inverse of a triangular matrix with 1 on its diagonal, which is not read.

    Inverses of blocks of 1, 2, 4 rows and so on are put together by products, which are small up to
    16 rows. None of their numbers exceeds 1 where keys have length 1, so nothing is lost where keys
    repeat.
    """
    BLOCKS: tl.constexpr = BLOCK_T // 16
    block = tl.arange(0, BLOCKS)
    inner = tl.arange(0, 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.where(same, tl.reshape(A, [BLOCKS, 16, BLOCKS, 16]), 0.0)
    diagonal = tl.sum(diagonal, axis=2)
    inv = tl.where(inner[:, None] == inner[None, :], 1.0, tl.zeros_like(diagonal))
    inv = merge_inverses(inv, diagonal, inner, 1, DTYPE)
    inv = tl.reshape(tl.where(same, inv[:, :, None, :], 0.0), [BLOCK_T, BLOCK_T])
    return merge_inverses(inv, A, offs_t, 16, DTYPE)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), exact to float32's last digits where it is small, too."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small  # rounded: the quotient makes up for it
    more = tl.where(above == 1.0, small, tl.log(above) * (small / (above - 1.0)))
    return tl.maximum(x, 0.0) + more


@triton.jit
def systems_kernel(
    convolved,
    gates,
    decay,
    bias,
    begins,
    chunks,
    logs,
    squares,
    stride,
    KEY_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    """Prepare a chunk for a value head, without a state.

    Each program reads gates, queries and keys of a chunk once. It sums the log decays g from the
    first row that each row depends on. Then it writes two matrices: the inverse of the triangular
    system A of what rows write, times their strengths beta, which turns values that are new into
    what the rows write; and scores of queries and keys, which turn that into outputs.
    """
    DTYPE: tl.constexpr = convolved.dtype.element_ty
    HEADS: tl.constexpr = KEY_HEADS * REPEAT
    KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    COLUMNS: tl.constexpr = 2 * KEYS + HEADS * VALUE_SIZE
    chunk = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(chunks + chunk * 4).to(tl.int64)
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, max(16, triton.next_power_of_2(KEY_SIZE)))
    length = tl.load(chunks + chunk * 4 + 4) - start
    if length <= 0:  # padding of a graph
        return
    mask_t = offs_t < length
    row_head = start * HEADS + head

    gates += start * stride + head
    beta = tl.sigmoid(tl.load(gates + offs_t * stride, mask=mask_t, other=0.0).to(tl.float32))
    step = tl.load(gates + offs_t * stride + HEADS, mask=mask_t, other=0.0).to(tl.float32)
    g = tl.load(decay + head) * softplus(step + tl.load(bias + head))
    first = tl.load(begins + start + offs_t, mask=mask_t, other=0) - start
    seen = (offs_t[:, None] >= offs_t[None, :]) & (offs_t[None, :] >= first[:, None])
    g = tl.sum(tl.where(seen & mask_t[None, :], g[None, :], 0.0), axis=1)
    tl.store(logs + row_head + offs_t * HEADS, g, mask=mask_t)

    mask_k = mask_t[:, None] & (offs_k < KEY_SIZE)[None, :]
    convolved += start * COLUMNS + head // REPEAT * KEY_SIZE
    at_k = offs_t[:, None] * COLUMNS + offs_k[None, :]
    q = tl.load(convolved + at_k, mask=mask_k, other=0.0)
    k = tl.load(convolved + KEYS + at_k, mask=mask_k, other=0.0)
    since = g[:, None] - g[None, :]
    between = tl.exp(tl.where(seen, since, float("-inf")))
    squares += row_head * 2 * BLOCK_T + offs_t[:, None] * (2 * HEADS * BLOCK_T) + offs_t[None, :]
    qk = dot(q, tl.trans(k), DTYPE) * between
    tl.store(squares + BLOCK_T, qk, mask=mask_t[:, None])
    A = dot(k, tl.trans(k), DTYPE) * between * beta[:, None]
    tl.store(squares, inverse(A, offs_t, DTYPE) * beta[None, :], mask=mask_t[:, None])


@triton.jit
def state_at(pool, held, place, STATE: tl.constexpr):
    """Return the pointer to a state at a place that has one."""
    return tl.where(place >= 0, pool + place * STATE, held + (-2 - place) * STATE)


@triton.jit
def walk_kernel(
    convolved,
    chunks,
    walks,
    logs,
    squares,
    pool,
    held,
    out,
    KEY_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Write BLOCK_V values of the outputs of a walk, and of the states that are kept.

    Each program loads its part of the walk's first state into registers. For each chunk it takes
    what the state knows of the keys from the values, applies `systems_kernel`'s matrices, writes
    outputs, and moves the state to the chunk's end. The next chunk is fetched meanwhile. Without
    CHAIN each walk has one chunk and keeps no state.
    """
    DTYPE: tl.constexpr = convolved.dtype.element_ty
    HEADS: tl.constexpr = KEY_HEADS * REPEAT
    KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    WIDTH: tl.constexpr = REPEAT * VALUE_SIZE  # of a state's row
    STATE: tl.constexpr = KEYS * WIDTH
    COLUMNS: tl.constexpr = 2 * KEYS + KEY_HEADS * WIDTH
    walks += tl.program_id(0) // HEADS * 3
    head = tl.program_id(0) % HEADS
    begin = tl.load(walks)
    end = tl.load(walks + 1)
    if begin == end:  # padding of a graph
        return
    source = tl.load(walks + 2).to(tl.int64)
    key_head = head // REPEAT
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, max(16, triton.next_power_of_2(KEY_SIZE)))
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k = offs_k < KEY_SIZE
    is_v = offs_v < VALUE_SIZE
    at_state = (key_head * KEY_SIZE + offs_k)[:, None] * WIDTH + head % REPEAT * VALUE_SIZE + offs_v
    mask_state = is_k[:, None] & is_v[None, :]
    begun = state_at(pool, held, source, STATE) + at_state
    state = tl.load(begun, mask=mask_state & (source != -1), other=0.0)
    for chunk in range(begin, end if CHAIN else begin + 1):
        entry = chunks + chunk * 4
        start = tl.load(entry).to(tl.int64)
        stop = tl.load(entry + 4)
        mask_t = offs_t < stop - start
        row_head = start * HEADS + head
        mask_k = mask_t[:, None] & is_k[None, :]
        mask_v = mask_t[:, None] & is_v[None, :]
        g = tl.load(logs + row_head + offs_t * HEADS, mask=mask_t, other=0.0)
        g_end = tl.load(logs + (stop.to(tl.int64) - 1) * HEADS + head)
        ptr_q = convolved + start * COLUMNS + key_head * KEY_SIZE
        ptr_v = convolved + start * COLUMNS + 2 * KEYS + head * VALUE_SIZE
        at_k = offs_t[:, None] * COLUMNS + offs_k[None, :]
        square = squares + row_head * 2 * BLOCK_T
        square += offs_t[:, None] * (2 * HEADS * BLOCK_T) + offs_t[None, :]
        k = tl.load(ptr_q + KEYS + at_k, mask=mask_k, other=0.0)
        known = tl.exp(g)[:, None] * dot(k, state, DTYPE)
        v = tl.load(ptr_v + offs_t[:, None] * COLUMNS + offs_v[None, :], mask=mask_v, other=0.0)
        inv = tl.load(square, mask=mask_t[:, None], other=0.0)
        written = dot(inv, v.to(tl.float32) - known, DTYPE)
        q = tl.load(ptr_q + at_k, mask=mask_k, other=0.0)
        acc = tl.exp(g)[:, None] * dot(q, state, DTYPE)
        qk = tl.load(square + BLOCK_T, mask=mask_t[:, None], other=0.0)
        acc += dot(qk, written, DTYPE)
        at_out = offs_t[:, None] * (HEADS * VALUE_SIZE) + offs_v[None, :]
        tl.store(out + row_head * VALUE_SIZE + at_out, acc, mask=mask_v)
        if CHAIN:
            kept = written * tl.exp(g_end - g)[:, None]
            state = tl.exp(g_end) * state + dot(tl.trans(k), kept, DTYPE)
            for target in tl.static_range(1, 4):
                slot = tl.load(entry + target).to(tl.int64)
                if slot != -1:
                    tl.store(state_at(pool, held, slot, STATE) + at_state, state, mask=mask_state)


@triton.jit
def load_rows(mixed, tails, place, stride, column, mask, COLUMNS: tl.constexpr):
    """Load rows by their places: rows of the batch, or kept ones, or zeros."""
    row = tl.where(place >= 0, mixed + place * stride, tails + (-2 - place) * COLUMNS)
    return tl.load(row[:, None] + column[None, :], mask=mask & (place != -1)[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def convolve_kernel(
    mixed,
    tails,
    places,
    weight,
    out,
    num_rows,
    stride,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Convolve BLOCK_M rows of a head.

    Each program multiplies its rows with the last tap's weights, then adds, tap by tap, the rows
    before them. SiLU follows; heads of queries and keys are normed, and queries scaled.
    """
    head = tl.program_id(1)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, triton.next_power_of_2(SIZE))
    column = head * SIZE + offs_n
    mask_m = offs_m < num_rows
    mask_n = (offs_n < SIZE) & (column < COLUMNS)
    mask = mask_m[:, None] & mask_n[None, :]
    x = load_rows(mixed, tails, offs_m, stride, column, mask, COLUMNS=COLUMNS)
    w = tl.load(weight + (TAPS - 1) * COLUMNS + column, mask=mask_n, other=0.0)
    acc = x.to(tl.float32) * w[None, :]
    for tap in tl.static_range(TAPS - 1):
        place = tl.load(places + offs_m * (TAPS - 1) + tap, mask=mask_m, other=-1).to(tl.int64)
        x = load_rows(mixed, tails, place, stride, column, mask, COLUMNS=COLUMNS)
        w = tl.load(weight + tap * COLUMNS + column, mask=mask_n, other=0.0)
        acc += x.to(tl.float32) * w[None, :]
    acc *= tl.sigmoid(acc)
    if head * SIZE < 2 * KEYS:
        scale = tl.where(head * SIZE < KEYS, SIZE**-0.5, 1.0)
        acc *= (tl.rsqrt(tl.sum(acc * acc, axis=1) + EPSILON) * scale)[:, None]
    to = offs_m[:, None] * COLUMNS + column[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def keep_tails_kernel(mixed, tails, kept, stride, COLUMNS: tl.constexpr, TAPS: tl.constexpr):
    """Read all rows of one tail after the other, in TAIL_COLUMNS of the columns, and write them to
    its slot."""
    offs_m = tl.arange(0, triton.next_power_of_2(TAPS - 1))
    column = tl.program_id(0) * TAIL_COLUMNS + tl.arange(0, TAIL_COLUMNS)
    mask_m = offs_m < TAPS - 1
    mask = mask_m[:, None] & (column < COLUMNS)[None, :]
    slot = tl.load(kept).to(tl.int64)
    while slot >= 0:
        place = tl.load(kept + 1 + offs_m, mask=mask_m, other=-1).to(tl.int64)
        rows = load_rows(mixed, tails, place, stride, column, mask, COLUMNS=COLUMNS)
        tl.debug_barrier()  # before another thread overwrites them
        to = (slot * (TAPS - 1) + offs_m)[:, None] * COLUMNS + column[None, :]
        tl.store(tails + to, rows, mask=mask)
        tl.debug_barrier()  # before another thread reads them for the next tail
        kept += TAPS
        slot = tl.load(kept).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    x, gate, weight, out, num_rows, stride, eps, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    """Norm BLOCK_M rows of a head, and multiply them with the weight and SiLU of the gate."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, triton.next_power_of_2(SIZE))
    column = tl.program_id(1) * SIZE + offs_n
    mask_n = offs_n < SIZE
    mask = (offs_m < num_rows)[:, None] & mask_n[None, :]
    at = offs_m[:, None] * COLUMNS + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / SIZE + eps)[:, None]
    value *= tl.load(weight + offs_n, mask=mask_n, other=0.0)[None, :]
    z = tl.load(gate + offs_m[:, None] * stride + column[None, :], mask=mask, other=0.0)
    z = z.to(tl.float32)
    value *= z * tl.sigmoid(z)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@chosen_once
def _launch(
    kernel: object, warps: int, stages: int = 1, unspecialized: int = 0, **constants: int
) -> CachedLaunch:
    options = {"num_warps": warps, "num_stages": stages}
    return CachedLaunch(kernel, constants, options, unspecialized=unspecialized, dtypes=(0, 1))


def convolve(
    mixed: Tensor, tails: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    rows, columns = mixed.shape
    out = mixed.new_empty(rows, columns)
    taps = {"COLUMNS": columns, "TAPS": len(weight), "KEYS": keys, "SIZE": size}
    grid = triton.cdiv(rows, BLOCK_M.value), triton.cdiv(columns, size)
    launch = _launch(convolve_kernel, ROW_WARPS, unspecialized=1, **taps)
    launch(grid, (mixed, tails, places, weight, out), (rows, mixed.stride(0)))
    return out


def keep_tails(mixed: Tensor, tails: Tensor, kept: Tensor) -> None:
    columns = mixed.shape[1]
    launch = _launch(keep_tails_kernel, ROW_WARPS, COLUMNS=columns, TAPS=kept.shape[1])
    launch((triton.cdiv(columns, TAIL_COLUMNS.value), 1), (mixed, tails, kept), (mixed.stride(0),))


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, heads, size = out.shape
    result = gate.new_empty(rows, heads * size)
    sizes = {"COLUMNS": heads * size, "SIZE": size}
    launch = _launch(gated_norm_kernel, ROW_WARPS, unspecialized=1, **sizes)
    grid = triton.cdiv(rows, BLOCK_M.value), heads
    launch(grid, (out, gate, weight, result), (rows, gate.stride(0), eps))
    return result


def delta_rule(
    convolved: Tensor, gates: Tensor, decay: Tensor, bias: Tensor, walks: Walks, pool: Tensor
) -> Tensor:
    _, key_heads, key_size, values = pool.shape
    rows = len(convolved)
    heads = len(decay)
    repeat = heads // key_heads
    value_size = values // repeat
    sizes = {"KEY_HEADS": key_heads, "REPEAT": repeat, "KEY_SIZE": key_size}
    sizes["VALUE_SIZE"] = value_size
    logs = pool.new_empty(rows, heads)
    squares = pool.new_empty(rows, heads, 2, CHUNK_SIZE)
    out = pool.new_empty(rows, heads, value_size)
    held = pool.new_empty(walks.held, *pool.shape[1:])
    by_row = convolved, gates, decay, bias, walks.begins, walks.chunks, logs, squares
    grid = (len(walks.chunks) - 1) * heads, 1
    _launch(systems_kernel, 4, **sizes)(grid, by_row, (gates.stride(0),))
    hopper = arch_of(pool) == 90
    for level, entries in enumerate(walks.walks):
        if count := entries.shape[0]:
            chain = level % 2 == 0
            # As many values of a program as leave its registers off the stack.
            block = 64 if hopper and not chain else 16
            warps = 4 if hopper or not chain else 8
            # What float32 would fetch ahead does not fit some devices.
            stages = 2 if chain and convolved.dtype != torch.float32 else 1
            walk = _launch(walk_kernel, warps, stages, BLOCK_V=block, CHAIN=chain, **sizes)
            tensors = convolved, walks.chunks, entries, logs, squares, pool, held, out
            walk((count * heads, triton.cdiv(value_size, block)), tensors, ())
    return out
