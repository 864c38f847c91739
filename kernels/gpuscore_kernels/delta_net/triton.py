"""Linear attention by the gated delta rule in Triton, on tensor cores.

Products with queries and keys of 16 bits take two numbers of 16 bits for each of float32. For a
model in float32 all products are three in TF32, which together are as exact as float32.

`systems_kernel` has a program for each chunk and value head: it solves the triangular system of
what the rows write, for every right side. Solutions of blocks of a row, of 2, of 4 and so on are
put together by products, small ones up to 16 rows. No number of a solution exceeds 1 where keys
have length 1, so nothing is lost where keys repeat.

`walk_kernel` has a program for each walk, value head and block of values. It holds its part of the
state in registers from chunk to chunk, and fetches the next chunk meanwhile. Walks of a level run
in one launch, whose code is another for walks that end with their only chunk.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.delta_net import LONGEST, Walks
from gpuscore_kernels.delta_net.reference import EPS
from gpuscore_kernels.launch import arch_of, next_power_of_two, row_warps

NAMES = "KEY_HEADS", "REPEAT", "KEY_SIZE", "VALUE_SIZE"
BLOCK = 2048  # elements of a program of rows: 16 heads of 128
ROWS = 4  # of a program that convolves
EPSILON = tl.constexpr(EPS)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return a @ b, with b in two parts where it is of float32 and a is not."""
    if a.dtype == b.dtype:
        return tl.dot(a, b, input_precision=PRECISION)
    high = b.to(a.dtype)
    return tl.dot(a, (b - high.to(tl.float32)).to(a.dtype), tl.dot(a, high))


@triton.jit
def doubled(solved, system, row, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of matrices, one for all of `row`, from those of their blocks of WIDTH."""
    block, width = row // WIDTH, 1
    while width * WIDTH < row.shape[0]:
        # From one block of each two to the other.
        between = (block[:, None] // width) ^ (block[None, :] // width) == 1
        step = product(solved, system * between.to(tl.float32), PRECISION)
        solved -= product(step, solved, PRECISION)
        width *= 2
    return solved


@triton.jit
def inverse(system, index, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of a triangular matrix with 1 on its diagonal, which is not read."""
    BLOCKS: tl.constexpr = SIZE // 16  # on the diagonal: small products are enough at first
    block, inner = tl.arange(0, BLOCKS), tl.arange(0, 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    own = tl.where(same, tl.reshape(system, [BLOCKS, 16, BLOCKS, 16]), 0.0)
    own, unit = tl.sum(own, axis=2), (inner[:, None] == inner[None, :])[None, :, :]
    solved = doubled(tl.where(unit, 1.0, tl.zeros_like(own)), own, inner, 1, PRECISION=PRECISION)
    solved = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), [SIZE, SIZE])
    return doubled(solved, system, index, 16, PRECISION=PRECISION)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), exact to float32's last digits where it is small, too."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small  # rounded: the quotient makes up for it
    more = tl.where(above == 1.0, small, tl.log(above) * (small / (above - 1.0)))
    return tl.maximum(x, 0.0) + more


@triton.jit(do_not_specialize=["stride"])
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
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write, for the rows of a chunk and a value head, the decay since the row began, and
    rows of two matrices: one turns values that are new into what the rows write, the other turns
    that into outputs."""
    HEADS: tl.constexpr = KEY_HEADS * REPEAT
    KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    COLUMNS: tl.constexpr = 2 * KEYS + HEADS * VALUE_SIZE
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(chunks + chunk * 4).to(tl.int64)
    index, inner = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    length = tl.load(chunks + chunk * 4 + 4) - start
    if length <= 0:  # of a graph's room
        return
    real, first_of_head = index < length, start * HEADS + head
    gates += start * stride + head
    by = tl.sigmoid(tl.load(gates + index * stride, mask=real, other=0.0).to(tl.float32))
    step = tl.load(gates + index * stride + HEADS, mask=real, other=0.0).to(tl.float32)
    log = tl.load(decay + head) * softplus(step + tl.load(bias + head))
    # Of the rows that a row depends on the first.
    first = tl.load(begins + start + index, mask=real, other=0) - start
    seen = (index[:, None] >= index[None, :]) & (index[None, :] >= first[:, None])
    log = tl.sum(tl.where(seen & real[None, :], log[None, :], 0.0), axis=1)
    tl.store(logs + first_of_head + index * HEADS, log, mask=real)
    inside = real[:, None] & (inner < KEY_SIZE)[None, :]
    convolved += start * COLUMNS + head // REPEAT * KEY_SIZE
    of_key = index[:, None] * COLUMNS + inner[None, :]
    q = tl.load(convolved + of_key, mask=inside, other=0.0)
    k = tl.load(convolved + KEYS + of_key, mask=inside, other=0.0)
    since = log[:, None] - log[None, :]
    between = tl.exp(tl.where(seen, since, float("-inf")))
    squares += first_of_head * 2 * SIZE + index[:, None] * (2 * HEADS * SIZE) + index[None, :]
    score = product(q, tl.trans(k), PRECISION) * between
    tl.store(squares + SIZE, score, mask=real[:, None])
    system = product(k, tl.trans(k), PRECISION) * between * by[:, None]
    solution = inverse(system, index, SIZE, PRECISION) * by[None, :]
    tl.store(squares, solution, mask=real[:, None])


@triton.jit
def state_at(pool, ends, place, STATE: tl.constexpr):
    """Return the pointer to a state at a place that has one."""
    return tl.where(place >= 0, pool + place * STATE, ends + (-2 - place) * STATE)


@triton.jit(do_not_specialize=["first"])
def walk_kernel(
    convolved,
    chunks,
    walks,
    logs,
    squares,
    pool,
    ends,
    out,
    first,
    KEY_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Write a block of values of a walk's outputs, and of the states that are kept; without CHAIN
    those of a walk of one chunk, which keeps none."""
    HEADS: tl.constexpr = KEY_HEADS * REPEAT
    KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    WIDTH: tl.constexpr = REPEAT * VALUE_SIZE  # of a state's row
    STATE: tl.constexpr = KEYS * WIDTH
    COLUMNS: tl.constexpr = 2 * KEYS + KEY_HEADS * WIDTH
    walk, head = first + tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    begin, end = tl.load(walks + walk * 3), tl.load(walks + walk * 3 + 1)
    if begin == end:  # of a graph's room
        return
    source = tl.load(walks + walk * 3 + 2).to(tl.int64)
    key_head = head // REPEAT
    index, inner = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = inner < KEY_SIZE, value < VALUE_SIZE
    place = (key_head * KEY_SIZE + inner)[:, None] * WIDTH + head % REPEAT * VALUE_SIZE + value
    inside = is_key[:, None] & is_value[None, :]
    begun = state_at(pool, ends, source, STATE) + place
    state = tl.load(begun, mask=inside & (source != -1), other=0.0)
    for chunk in range(begin, end if CHAIN else begin + 1):
        entry = chunks + chunk * 4
        start, stop = tl.load(entry).to(tl.int64), tl.load(entry + 4)
        real, first_of_head = index < stop - start, start * HEADS + head
        at_key, at_value = real[:, None] & is_key[None, :], real[:, None] & is_value[None, :]
        log = tl.load(logs + first_of_head + index * HEADS, mask=real, other=0.0)
        total = tl.load(logs + (stop.to(tl.int64) - 1) * HEADS + head)
        of_q = convolved + start * COLUMNS + key_head * KEY_SIZE
        of_v = convolved + start * COLUMNS + 2 * KEYS + head * VALUE_SIZE
        of_key = index[:, None] * COLUMNS + inner[None, :]
        square = squares + first_of_head * 2 * SIZE
        square += index[:, None] * (2 * HEADS * SIZE) + index[None, :]
        k = tl.load(of_q + KEYS + of_key, mask=at_key, other=0.0)
        known = tl.exp(log)[:, None] * product(k, state, PRECISION)
        new = tl.load(of_v + index[:, None] * COLUMNS + value[None, :], mask=at_value, other=0.0)
        solution = tl.load(square, mask=real[:, None], other=0.0)
        written = product(solution, new.to(tl.float32) - known, PRECISION)
        q = tl.load(of_q + of_key, mask=at_key, other=0.0)
        result = tl.exp(log)[:, None] * product(q, state, PRECISION)
        score = tl.load(square + SIZE, mask=real[:, None], other=0.0)
        result += product(score, written, PRECISION)
        to = index[:, None] * (HEADS * VALUE_SIZE) + value[None, :]
        tl.store(out + first_of_head * VALUE_SIZE + to, result, mask=at_value)
        if CHAIN:
            kept = written * tl.exp(total - log)[:, None]
            state = tl.exp(total) * state + product(tl.trans(k), kept, PRECISION)
            for target in tl.static_range(1, 4):
                slot = tl.load(entry + target).to(tl.int64)
                if slot != -1:
                    tl.store(state_at(pool, ends, slot, STATE) + place, state, mask=inside)


@triton.jit
def row_at(new, old, place, column, inside):
    """Return a row of the batch, or a kept one, or zeros."""
    row = tl.where(place >= 0, new, old)
    return tl.load(row + column, mask=inside & (place != -1), other=0.0)


@triton.jit
def columns_of(COLUMNS, SIZE, BLOCK_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the heads of a program, their columns, and which of these there are."""
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inner = tl.arange(0, BLOCK_SIZE)[None, :]
    column = head[:, None] * SIZE + inner
    return head, column, (inner < SIZE) & (column < COLUMNS)


@triton.jit
def nothing():
    """Return no blocks, of any type."""
    return ()


@triton.jit(do_not_specialize=["rows"])
def convolve_kernel(
    mixed,
    tails,
    places,
    weight,
    out,
    rows,
    stride,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write a block of heads of a few rows, which share what is read of the weights."""
    head, column, inside = columns_of(COLUMNS, SIZE, BLOCK_HEADS, BLOCK_SIZE)
    weights = nothing()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(weight + tap * COLUMNS + column, mask=inside, other=0.0),)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, min(first + ROWS, rows)):
        own = tl.load(mixed + row * stride + column, mask=inside, other=0.0)
        total = own.to(tl.float32) * weights[TAPS - 1]
        for tap in tl.static_range(TAPS - 1):
            place = tl.load(places + row * (TAPS - 1) + tap).to(tl.int64)
            new, old = mixed + place * stride, tails + (-2 - place) * COLUMNS
            x = row_at(new, old, place, column, inside=inside)
            total += x.to(tl.float32) * weights[tap]
        total *= tl.sigmoid(total)
        factor = tl.rsqrt(tl.sum(total * total, axis=1) + EPSILON)
        factor = tl.where(head * SIZE < KEYS, factor * (SIZE**-0.5), factor)
        total *= tl.where(head * SIZE < 2 * KEYS, factor, 1.0)[:, None]
        tl.store(out + row * COLUMNS + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep_tails_kernel(
    mixed,
    tails,
    kept,
    stride,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write a block of columns of a slot. Its own rows only move forward."""
    _, column, inside = columns_of(COLUMNS, SIZE, BLOCK_HEADS, BLOCK_SIZE)
    entry = kept + tl.program_id(0) * TAPS
    slot = tl.load(entry).to(tl.int64)
    for tap in tl.static_range(TAPS - 1):
        place = tl.load(entry + tap + 1).to(tl.int64)
        new, old = mixed + place * stride, tails + (-2 - place) * COLUMNS
        row = row_at(new, old, place, column, inside=inside)
        tl.debug_barrier()  # before another thread overwrites it
        to = tails + (slot * (TAPS - 1) + tap) * COLUMNS + column
        tl.store(to, row, mask=inside & (slot >= 0))


@triton.jit
def gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    stride,
    eps,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write a block of heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    head, column, inside = columns_of(COLUMNS, SIZE, BLOCK_HEADS, BLOCK_SIZE)
    value = tl.load(x + row * COLUMNS + column, mask=inside, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / SIZE + eps)[:, None]
    value *= tl.load(weight + column - head[:, None] * SIZE, mask=inside, other=0.0)
    opened = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value *= opened * tl.sigmoid(opened)
    tl.store(out + row * COLUMNS + column, value.to(out.dtype.element_ty), mask=inside)


@chosen_once
def _of_chunks(
    kernel: Any, sizes: tuple[int, ...], precision: str, warps: int = 4, **own: int
) -> CachedLaunch:
    """Return the launch for key heads, value heads of each, and their sizes."""
    block = max(16, next_power_of_two(sizes[2]))
    of_all = {"SIZE": LONGEST, "BLOCK_K": block, "PRECISION": precision}
    constants = {**dict(zip(NAMES, sizes, strict=True)), **of_all, **own}
    # What float32 would fetch ahead does not fit some devices.
    ahead = own.get("CHAIN", False) and precision == "tf32"
    options = {"num_warps": warps, "num_stages": 2 if ahead else 1}
    return CachedLaunch(kernel, constants, options, free=1, dtypes=(0, 1))


@chosen_once
def _of_rows(
    kernel: Any, columns: int, size: int, free: int = 0, **own: int
) -> tuple[CachedLaunch, int]:
    """Return the launch for heads of `size` columns, and the number of programs of a row."""
    wide, heads = next_power_of_two(size), triton.cdiv(columns, size)
    block = min(next_power_of_two(heads), max(1, BLOCK // wide))
    own |= {"COLUMNS": columns, "SIZE": size, "BLOCK_HEADS": block, "BLOCK_SIZE": wide}
    options = {"num_warps": row_warps(block * wide)}
    programs = triton.cdiv(heads, block)
    return CachedLaunch(kernel, own, options, free=free, dtypes=(0, 1)), programs


def convolve(
    mixed: Tensor, tails: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    rows, columns = mixed.shape
    out = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    own = {"TAPS": len(weight), "KEYS": keys, "ROWS": ROWS}
    launch, programs = _of_rows(convolve_kernel, columns, size, free=1, **own)
    tensors = mixed, tails, places, weight, out
    launch((triton.cdiv(rows, ROWS), programs), tensors, (rows, mixed.stride(0)))
    return out


def keep_tails(mixed: Tensor, tails: Tensor, kept: Tensor) -> None:
    launch, programs = _of_rows(keep_tails_kernel, mixed.shape[1], BLOCK, TAPS=kept.shape[1])
    launch((len(kept), programs), (mixed, tails, kept), (mixed.stride(0),))


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, heads, size = out.shape
    result = torch.empty((rows, heads * size), dtype=gate.dtype, device=gate.device)
    launch, programs = _of_rows(gated_norm_kernel, heads * size, size)
    launch((rows, programs), (out, gate, weight, result), (gate.stride(0), eps))
    return result


def delta_rule(
    convolved: Tensor, gates: Tensor, decay: Tensor, bias: Tensor, walks: Walks, pool: Tensor
) -> Tensor:
    _, key_heads, key_size, values = pool.shape
    rows, heads, chunks = len(convolved), len(decay), len(walks.chunks) - 1
    sizes = key_heads, heads // key_heads, key_size, values * key_heads // heads
    kind = sizes, "tf32x3" if convolved.dtype == torch.float32 else "tf32"
    shapes = (rows, heads), (rows, heads, 2, LONGEST), (rows, heads, sizes[3])
    logs, squares, out, held = (
        torch.empty(shape, dtype=torch.float32, device=pool.device)
        for shape in (*shapes, (walks.held, *pool.shape[1:]))
    )
    by_row = convolved, gates, decay, bias, walks.begins, walks.chunks, logs, squares
    _of_chunks(systems_kernel, *kind)((chunks * heads, 1), by_row, (gates.stride(0),))
    first, hopper = 0, arch_of(pool) == 90
    for level, count in enumerate(walks.levels):
        if count:
            chain = level % 2 == 0
            # As many values of a program as leave its registers off the stack.
            most = 64 if hopper and not chain else 16
            block = min(most, max(16, next_power_of_two(sizes[3])))
            walk = _of_chunks(
                walk_kernel, *kind, 4 if hopper or not chain else 8, BLOCK_V=block, CHAIN=chain
            )
            tensors = convolved, walks.chunks, walks.walks, logs, squares, pool, held, out
            walk((count * heads, triton.cdiv(sizes[3], block)), tensors, (first,))
        first += count
    return out
