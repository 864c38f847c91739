"""Linear attention by the gated delta rule in Triton, on tensor cores.

Products are in TF32, three for each product of float32, which together are as exact as float32.

`systems_kernel` has a program for each chunk and value head: it solves the triangular system of
what the rows write, for every right side. Rows of a block of 16 are found one after the other, for
all blocks at once, then block after block. No number of the solution exceeds 1 where keys have
length 1, so nothing is lost where keys repeat. `delta_chunks_kernel` also divides the values among
programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.launch import next_power_of_two

# Columns of keys at a time, and of values of a program, so that no register is spilled.
KEYS_OF_SYSTEMS, KEYS_OF_CHUNKS, VALUES = 16, 32, 32
STAGES = 3
ROWS = tl.constexpr(16)  # of a block of the triangular system


@triton.jit
def product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def inverse(system, index, BLOCKS: tl.constexpr):
    """Return the inverse of I + system, which is square and 0 from its diagonal on."""
    SIZE: tl.constexpr = BLOCKS * ROWS
    block, inner = tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    columns = tl.reshape(system, [SIZE, BLOCKS, ROWS])
    diagonal = (index // ROWS)[:, None, None] == block[None, :, None]
    own = tl.reshape(tl.sum(tl.where(diagonal, columns, 0.0), axis=1), [BLOCKS, ROWS, ROWS])
    unit = (inner[:, None] == inner[None, :]).to(tl.float32)
    of_own = tl.broadcast_to(unit[None, :, :], [BLOCKS, ROWS, ROWS])
    for done in range(ROWS - 1):  # rows of a block that are final
        column = tl.sum(tl.where(inner[None, None, :] == done, own, 0.0), axis=2)
        row = tl.sum(tl.where(inner[None, :, None] == done, of_own, 0.0), axis=1)
        of_own -= column[:, :, None] * row[:, None, :]
    solved = (index[:, None] == index[None, :]).to(tl.float32)
    for done in tl.static_range(BLOCKS):
        chosen = block[:, None, None] == done
        rows = tl.sum(tl.where(chosen, tl.reshape(solved, [BLOCKS, ROWS, SIZE]), 0.0), axis=0)
        rows = product(tl.sum(tl.where(chosen, of_own, 0.0), axis=0), rows)
        # What is taken from the block's own rows leaves their solution there.
        column = tl.sum(tl.where(block[None, :, None] == done, columns, 0.0), axis=1)
        solved -= product(column, rows)
    return solved


@triton.jit
def rows_of(rows, chunk, index, length, last):
    """Return the rows of a chunk, and which of them are no padding."""
    row = tl.load(rows + chunk * length + index, mask=index < length, other=last)
    return row, row < last


@triton.jit(do_not_specialize=["last", "length"])
def systems_kernel(
    convolved,
    strength,
    decay,
    rows,
    solutions,
    scores,
    last,
    length,
    key_size,
    KEY_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write, for a chunk and value head, two matrices [SIZE, SIZE]: one turns values that are new
    into what the rows write, the other turns that into outputs.

    `key_size` is also KEY_SIZE, because a loop to a constant would be unrolled.
    """
    HEADS: tl.constexpr = KEY_HEADS * REPEAT
    KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    COLUMNS: tl.constexpr = 2 * KEYS + HEADS * VALUE_SIZE
    chunk, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    index, inner = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    row, real = rows_of(rows, chunk, index, length, last)
    by = tl.load(strength + row * HEADS + head, mask=real, other=0.0)
    log = tl.cumsum(tl.load(decay + row * HEADS + head, mask=real, other=0.0), axis=0)
    from_q = convolved + row[:, None] * COLUMNS + head // REPEAT * KEY_SIZE + inner[None, :]
    among_keys = tl.zeros([SIZE, SIZE], tl.float32)
    score = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, key_size, BLOCK_K):
        mask = real[:, None] & (start + inner < KEY_SIZE)[None, :]
        q = tl.load(from_q + start, mask=mask, other=0.0)
        k = tl.load(from_q + KEYS + start, mask=mask, other=0.0)
        among_keys += product(k, tl.trans(k))
        score += product(q, tl.trans(k))
    since = log[:, None] - log[None, :]
    between = tl.exp(tl.where(index[:, None] >= index[None, :], since, float("-inf")))
    place = tl.program_id(0).to(tl.int64) * (SIZE * SIZE) + index[:, None] * SIZE + index[None, :]
    tl.store(scores + place, score * between)
    system = among_keys * between * by[:, None]
    system = tl.where(index[:, None] > index[None, :], system, 0.0)
    tl.store(solutions + place, inverse(system, index, SIZE // ROWS) * by[None, :])


@triton.jit(do_not_specialize=["last", "length", "ends"])
def delta_chunks_kernel(
    convolved,
    decay,
    rows,
    sources,
    before,
    solutions,
    scores,
    out,
    states,
    last,
    length,
    ends,
    source_step,
    key_size,
    KEY_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """Write a block of values of a chunk's outputs, and of the state after it if it is one of the
    first `ends`."""
    HEADS: tl.constexpr = KEY_HEADS * REPEAT
    KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    WIDTH: tl.constexpr = REPEAT * VALUE_SIZE  # of a state's row
    COLUMNS: tl.constexpr = 2 * KEYS + KEY_HEADS * WIDTH
    chunk, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    key_head = head // REPEAT
    index, inner = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    row, real = rows_of(rows, chunk, index, length, last)
    log = tl.cumsum(tl.load(decay + row * HEADS + head, mask=real, other=0.0), axis=0)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = (value < VALUE_SIZE) | (VALUE_SIZE % BLOCK_V == 0)
    from_q = convolved + row[:, None] * COLUMNS + key_head * KEY_SIZE + inner[None, :]
    place = (key_head * KEY_SIZE + inner)[:, None] * WIDTH + head % REPEAT * VALUE_SIZE + value
    at_value = real[:, None] & is_value[None, :]
    from_v = convolved + row[:, None] * COLUMNS + 2 * KEYS + head * VALUE_SIZE + value[None, :]
    new = tl.load(from_v, mask=at_value, other=0.0)
    result = tl.zeros([SIZE, BLOCK_V], tl.float32)
    if HAS_STATE:
        source = tl.load(sources + chunk * source_step)
        from_state = before + source * (KEYS * WIDTH) + place
        known = tl.zeros([SIZE, BLOCK_V], tl.float32)
        for start in range(0, key_size, BLOCK_K):
            is_key = (start + inner < KEY_SIZE) | (KEY_SIZE % BLOCK_K == 0)
            mask = real[:, None] & is_key[None, :]
            q = tl.load(from_q + start, mask=mask, other=0.0)
            k = tl.load(from_q + KEYS + start, mask=mask, other=0.0)
            inside = is_key[:, None] & is_value[None, :]
            state = tl.load(from_state + start * WIDTH, mask=inside, other=0.0)
            known += product(k, state)
            result += product(q, state)
        new -= tl.exp(log)[:, None] * known
        result *= tl.exp(log)[:, None]
    square = tl.program_id(0).to(tl.int64) * (SIZE * SIZE) + index[:, None] * SIZE + index[None, :]
    written = product(tl.load(solutions + square), new)
    result += product(tl.load(scores + square), written)
    to = out + row[:, None] * (HEADS * VALUE_SIZE) + head * VALUE_SIZE + value[None, :]
    tl.store(to, result, mask=at_value)
    if chunk >= ends:
        return

    total = tl.sum(tl.where(index == SIZE - 1, log, 0.0), axis=0)
    kept = tl.trans(written * tl.exp(total - log)[:, None])
    for begin in range(0, key_size, BLOCK_K):
        is_key = (begin + inner < KEY_SIZE) | (KEY_SIZE % BLOCK_K == 0)
        inside = is_key[:, None] & is_value[None, :]
        mask = real[:, None] & is_key[None, :]
        k = tl.load(from_q + KEYS + begin, mask=mask, other=0.0)
        after = tl.trans(product(kept, k))
        if HAS_STATE:
            state = tl.load(from_state + begin * WIDTH, mask=inside, other=0.0)
            after += tl.exp(total) * state
        tl.store(states + chunk * (KEYS * WIDTH) + place + begin * WIDTH, after, mask=inside)


def _systems(sizes: tuple[int, int, int, int], rows: int) -> dict[str, int]:
    names = "KEY_HEADS", "REPEAT", "KEY_SIZE", "VALUE_SIZE"
    return dict(zip(names, sizes, strict=True)) | {"SIZE": rows, "BLOCK_K": KEYS_OF_SYSTEMS}


def _chunks(sizes: tuple[int, int, int, int], rows: int, has_state: bool) -> dict[str, int]:
    block = min(VALUES, max(16, next_power_of_two(sizes[3])))
    own = {"BLOCK_K": KEYS_OF_CHUNKS, "BLOCK_V": block, "HAS_STATE": has_state}
    return _systems(sizes, rows) | own


def _warps(rows: int) -> int:
    """Return as many warps as let each thread copy 16 bytes of the smallest tile."""
    return rows * KEYS_OF_SYSTEMS // (4 * 32)


@chosen_once
def _launch_chunks(
    sizes: tuple[int, int, int, int], rows: int, has_state: bool
) -> tuple[CachedLaunch, CachedLaunch, int]:
    options = {"num_warps": _warps(rows), "num_stages": STAGES}
    constants = _chunks(sizes, rows, has_state)
    return (
        CachedLaunch(systems_kernel, _systems(sizes, rows), options, free=2, dtypes=()),
        CachedLaunch(delta_chunks_kernel, constants, options, free=3, dtypes=()),
        triton.cdiv(sizes[3], constants["BLOCK_V"]),
    )


def delta_chunks(
    convolved: Tensor,
    strength: Tensor,
    decay: Tensor,
    rows: Tensor,
    sources: Tensor | None,
    ends: int,
    before: Tensor,
    out: Tensor,
) -> Tensor:
    (chunks, length), (behind, heads, value_size) = rows.shape, out.shape
    key_heads, key_size = before.shape[1:3]
    sizes = key_heads, heads // key_heads, key_size, value_size
    size = max(ROWS.value, next_power_of_two(length))
    solve, run, programs = _launch_chunks(sizes, size, sources is not None)
    square = (chunks * heads, size, size)
    solutions, scores = (
        torch.empty(square, dtype=torch.float32, device=out.device) for _ in range(2)
    )
    states = torch.empty((ends, *before.shape[1:]), dtype=torch.float32, device=out.device)
    of_rows = behind - 1, length
    tensors = convolved, strength, decay, rows, solutions, scores
    solve((chunks * heads, 1), tensors, (*of_rows, key_size))
    read, step = (rows, 0) if sources is None else (sources, int(len(sources) > 1))
    run(
        (chunks * heads, programs),
        (convolved, decay, rows, read, before, solutions, scores, out, states),
        (*of_rows, ends, step, key_size),
    )
    return states
