"""Linear attention by the gated delta rule in Triton, on tensor cores.

Products are in TF32, three for each product of float32, which together are as exact as float32.

`systems_kernel` has a program for each chunk and value head: it solves the triangular system of
what the rows write, for every right side. Rows of a block of 16 are found one after the other, for
all blocks at once, then block after block. No number of the solution exceeds 1 where keys have
length 1, so nothing is lost where keys repeat.

`walk_kernel` has a program for each walk, value head and block of values. It holds its part of the
state in registers from chunk to chunk. Walks of a level run in one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.delta_net import LONGEST, Walks
from gpuscore_kernels.launch import next_power_of_two

# Columns of keys at a time, and of values of a program, so that no register is spilled.
BLOCK_KEYS, VALUES, STAGES = 32, 64, 3
ROWS_OF_CHUNK = LONGEST["triton"]
NAMES = "KEY_HEADS", "REPEAT", "KEY_SIZE", "VALUE_SIZE"
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
    chunks,
    logs,
    solutions,
    scores,
    stride,
    key_size,
    KEY_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write, for the rows of a chunk and a value head, the decay since the chunk's beginning, and
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
    row, real = start + index, index < length
    by = tl.sigmoid(tl.load(gates + row * stride + head, mask=real, other=0.0).to(tl.float32))
    by = tl.where(real, by, 0.0)
    step = tl.load(gates + row * stride + HEADS + head, mask=real, other=0.0).to(tl.float32)
    log = tl.load(decay + head) * softplus(step + tl.load(bias + head))
    log = tl.cumsum(tl.where(real, log, 0.0), axis=0)
    tl.store(logs + row * HEADS + head, log, mask=real)
    from_q = convolved + row[:, None] * COLUMNS + head // REPEAT * KEY_SIZE + inner[None, :]
    among_keys, score = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    for begin in range(0, key_size, BLOCK_K):
        inside = real[:, None] & (begin + inner < KEY_SIZE)[None, :]
        q = tl.load(from_q + begin, mask=inside, other=0.0)
        k = tl.load(from_q + KEYS + begin, mask=inside, other=0.0)
        among_keys += product(k, tl.trans(k))
        score += product(q, tl.trans(k))
    since = log[:, None] - log[None, :]
    between = tl.exp(tl.where(index[:, None] >= index[None, :], since, float("-inf")))
    place = (row[:, None] * HEADS + head) * SIZE + index[None, :]
    system = among_keys * between * by[:, None]
    system = tl.where(index[:, None] > index[None, :], system, 0.0)
    solution = inverse(system, index, SIZE // ROWS) * by[None, :]
    tl.store(solutions + place, solution, mask=real[:, None])
    tl.store(scores + place, score * between, mask=real[:, None])


@triton.jit
def nothing():
    """Return no blocks, of any type."""
    return ()


@triton.jit
def turned(states, last):
    """Return the blocks of a state from the second on, then `last`."""
    rest = nothing()
    for block in tl.static_range(1, len(states)):
        # As it is computed, Triton fetches ahead in loops around this.
        rest += (states[block] + 0.0,)
    return rest + (last + 0.0,)


@triton.jit(do_not_specialize=["first"])
def walk_kernel(
    convolved,
    chunks,
    walks,
    logs,
    solutions,
    scores,
    pool,
    ends,
    out,
    first,
    key_size,
    KEY_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write a block of values of a walk's outputs, and of the states that are kept."""
    HEADS: tl.constexpr = KEY_HEADS * REPEAT
    KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    WIDTH: tl.constexpr = REPEAT * VALUE_SIZE  # of a state's row
    STATE: tl.constexpr = KEYS * WIDTH
    COLUMNS: tl.constexpr = 2 * KEYS + KEY_HEADS * WIDTH
    walk, head = first + tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    begin, end = tl.load(walks + walk * 3), tl.load(walks + walk * 3 + 1)
    source = tl.load(walks + walk * 3 + 2).to(tl.int64)
    key_head = head // REPEAT
    index, inner = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = value < VALUE_SIZE
    place = (key_head * KEY_SIZE + inner)[:, None] * WIDTH + head % REPEAT * VALUE_SIZE + value
    states = nothing()
    for block in tl.static_range(BLOCKS):
        inside = (block * BLOCK_K + inner < KEY_SIZE)[:, None] & is_value[None, :]
        at = place + block * BLOCK_K * WIDTH
        # Of these, one is read at most.
        from_pool, from_ends = pool + source * STATE + at, ends + (-2 - source) * STATE + at
        state = tl.load(from_pool, mask=inside & (source >= 0), other=0.0)
        states += (state + tl.load(from_ends, mask=inside & (source < -1), other=0.0),)
    for chunk in range(begin, end):
        entry = chunks + chunk * 4
        start, stop = tl.load(entry).to(tl.int64), tl.load(entry + 4)
        row, real = start + index, index < stop - start
        log = tl.load(logs + row * HEADS + head, mask=real, other=0.0)
        total = tl.load(logs + (stop.to(tl.int64) - 1) * HEADS + head)
        from_q = convolved + row[:, None] * COLUMNS + key_head * KEY_SIZE + inner[None, :]
        known = tl.zeros([SIZE, BLOCK_V], tl.float32)
        result = tl.zeros([SIZE, BLOCK_V], tl.float32)
        for key in range(0, key_size, BLOCK_K):
            at_key = real[:, None] & (key + inner < KEY_SIZE)[None, :]
            q = tl.load(from_q + key, mask=at_key, other=0.0)
            k = tl.load(from_q + KEYS + key, mask=at_key, other=0.0)
            state = states[0]
            known += product(k, state)
            result += product(q, state)
            states = turned(states, state)
        at_value = real[:, None] & is_value[None, :]
        from_v = convolved + row[:, None] * COLUMNS + 2 * KEYS + head * VALUE_SIZE + value[None, :]
        new = tl.load(from_v, mask=at_value, other=0.0)
        square = (row[:, None] * HEADS + head) * SIZE + index[None, :]
        solution = tl.load(solutions + square, mask=real[:, None], other=0.0)
        score = tl.load(scores + square, mask=real[:, None], other=0.0)
        written = product(solution, new - tl.exp(log)[:, None] * known)
        result = tl.exp(log)[:, None] * result + product(score, written)
        to = out + (row[:, None] * HEADS + head) * VALUE_SIZE + value[None, :]
        tl.store(to, result, mask=at_value)
        if (chunk + 1 < end) | (tl.load(entry + 1) != -1):  # else nothing begins where this ends
            kept = written * tl.exp(total - log)[:, None]
            for key in range(0, key_size, BLOCK_K):
                at_key = real[:, None] & (key + inner < KEY_SIZE)[None, :]
                k = tl.load(from_q + KEYS + key, mask=at_key, other=0.0)
                after = tl.exp(total) * states[0] + product(tl.trans(k), kept)
                states = turned(states, after)
        for target in tl.static_range(1, 4):
            slot = tl.load(entry + target).to(tl.int64)
            for block in tl.static_range(BLOCKS):
                inside = (block * BLOCK_K + inner < KEY_SIZE)[:, None] & is_value[None, :]
                at = place + block * BLOCK_K * WIDTH
                tl.store(pool + slot * STATE + at, states[block], mask=inside & (slot >= 0))
                tl.store(ends + (-2 - slot) * STATE + at, states[block], mask=inside & (slot < -1))


@chosen_once
def _systems(sizes: tuple[int, ...]) -> CachedLaunch:
    """Return the launch for key heads, value heads of each, and their sizes."""
    own = {"SIZE": ROWS_OF_CHUNK, "BLOCK_K": 16}
    constants = dict(zip(NAMES, sizes, strict=True)) | own
    options = {"num_warps": 4, "num_stages": STAGES}
    return CachedLaunch(systems_kernel, constants, options, free=1, dtypes=(1,))


@chosen_once
def _walk(sizes: tuple[int, ...]) -> CachedLaunch:
    block, blocks = (
        min(VALUES, max(16, next_power_of_two(sizes[3]))),
        triton.cdiv(sizes[2], BLOCK_KEYS),
    )
    own = {"SIZE": ROWS_OF_CHUNK, "BLOCK_K": BLOCK_KEYS, "BLOCK_V": block, "BLOCKS": blocks}
    options = {"num_warps": 8, "num_stages": STAGES}
    return CachedLaunch(
        walk_kernel, dict(zip(NAMES, sizes, strict=True)) | own, options, free=1, dtypes=()
    )


def delta_rule(
    convolved: Tensor, gates: Tensor, decay: Tensor, bias: Tensor, walks: Walks, pool: Tensor
) -> Tensor:
    _, key_heads, key_size, values = pool.shape
    rows, heads, chunks = len(convolved), len(decay), len(walks.chunks) - 1
    sizes = key_heads, heads // key_heads, key_size, values * key_heads // heads
    shapes = (
        *((rows, heads, columns) for columns in (1, ROWS_OF_CHUNK, ROWS_OF_CHUNK, sizes[3])),
        (walks.held, *pool.shape[1:]),
    )
    logs, solutions, scores, out, held = (
        torch.empty(shape, dtype=torch.float32, device=pool.device) for shape in shapes
    )
    of_rows = logs, solutions, scores
    by_row = convolved, gates, decay, bias, walks.chunks, *of_rows
    _systems(sizes)((chunks * heads, 1), by_row, (gates.stride(0), key_size))
    walk, first = _walk(sizes), 0
    programs = triton.cdiv(sizes[3], walk.constants["BLOCK_V"])
    for count in walks.levels:
        tensors = convolved, walks.chunks, walks.walks, *of_rows, pool, held, out
        walk((count * heads, programs), tensors, (first, key_size))
        first += count
    return out
