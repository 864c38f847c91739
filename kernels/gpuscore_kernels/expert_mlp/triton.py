"""The MLPs of a mixture of experts in Triton: grouped matrix products, then a weighted sum.

A program multiplies a tile of up to BLOCK_M rows of one expert with a tile of its weights. Which
rows those are it finds from the experts' first places, on the device, so launches depend on the
number of rows only: there are as many programs as the worst division of the rows needs, and those
without a tile end at once.

A row's bits do not depend on the other rows. Each number of a tile is a dot product of its own over
one row of either side; every program runs over the columns in the same steps, and no sum is divided
among programs. So neither the other rows of the tile, nor their number, nor the row's place in it
enter the result. Rows beyond the expert's last are zeros and are not stored. The sum over a row's
experts is in the order of their weights, and nothing is added atomically.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.gated.triton import activated
from gpuscore_kernels.launch import (
    INTERPRETER,
    LaunchConfig,
    arch_of,
    next_power_of_two,
    row_warps,
)
from gpuscore_kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class ProductTiles(LaunchConfig):
    """Tiles of the products; see `LaunchConfig`."""

    BLOCK_M: int  # rows of one expert
    BLOCK_N: int  # columns of a product
    BLOCK_K: int  # elements of a dot product at a time

    def constants(self, columns: int, width: int, experts: int) -> dict[str, object]:
        """Return the compile-time arguments of a product that is [places, columns], of rows of
        `width` elements."""
        return self.sizes() | {
            "EXPERTS": experts,
            "BLOCK": next_power_of_two(experts),
            "EVEN_N": columns % self.BLOCK_N == 0,
            "EVEN_K": width % self.BLOCK_K == 0,
        }


def config_for(arch: int, dtype: torch.dtype) -> ProductTiles:
    """Return the configuration. A tile of 128 x 128 does 64 operations per byte that it copies,
    one of 64 x 128 only 43. Three stages take 64 KiB of shared memory, on sm_90 96, where two
    blocks fit on a multiprocessor: one multiplies while the other looks for its tile or stores it.
    With 128 x 256 only one would, and the first kernel would take all 255 registers."""
    if arch == INTERPRETER:
        return ProductTiles(16, 32, 16, num_warps=4, num_stages=1)
    if dtype == torch.float32:  # no tensor cores, so accumulators and operands are in registers
        return ProductTiles(64, 64, 32, num_warps=8, num_stages=2)
    return ProductTiles(128, 128, 64, num_warps=8, num_stages=3)


def most_tiles(places: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` rows that any division of the places among experts has."""
    full = min(experts, places)  # experts that have a place, and so at least one tile
    return full + (places - full) // rows


COMBINED = 1024  # columns of a program of the weighted sum


@triton.jit
def _tile_of(starts, tile, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's expert, its places, and a mask of the places that are the expert's own. If
    there is no such tile, the expert is EXPERTS or more."""
    expert = tl.arange(0, BLOCK)
    first = tl.load(starts + expert, mask=expert < EXPERTS, other=0)
    last = tl.load(starts + 1 + expert, mask=expert < EXPERTS, other=0)
    tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    own = tl.sum((ends <= tile).to(tl.int32), axis=0)
    before = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    is_tile = own < EXPERTS
    start = tl.load(starts + own, mask=is_tile, other=0) + (tile - before) * BLOCK_M
    place = start + tl.arange(0, BLOCK_M)
    return own, place, place < tl.load(starts + own + 1, mask=is_tile, other=0)


@triton.jit
def _product(
    left,
    right,
    is_row,
    is_column,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Return the products of rows of both sides, float32 [BLOCK_M, BLOCK_N].

    `left` and `right` point to the rows' first elements. `width` is not a compile-time constant,
    because the loop over it would be unrolled.
    """
    k = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        a_mask, b_mask = is_row[:, None], is_column[:, None]
        if not EVEN_K:
            a_mask, b_mask = a_mask & (start + k < width), b_mask & (start + k < width)
        a = tl.load(left[:, None] + start + k, mask=a_mask, other=0.0)
        if EVEN_N and EVEN_K:
            b = tl.load(right[:, None] + start + k)
        else:
            b = tl.load(right[:, None] + start + k, mask=b_mask, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def expert_gate_up_kernel(
    x,
    gate_up,
    rows,
    starts,
    out,
    x_stride,
    width,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Write act(gate) * up of every place, out [places, INNER].

    A tile has BLOCK_N / 2 columns of the gate and the same of the up projection, alternately, so
    that one thread holds a gate and its factor.
    """
    across: tl.constexpr = (2 * INNER + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // across
    expert, place, is_row = _tile_of(starts, tile, EXPERTS, BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    part = tl.program_id(0) % across * (BLOCK_N // 2)
    column = tl.arange(0, BLOCK_N)
    inner = part + column // 2
    row = tl.load(rows + place, mask=is_row, other=0)
    weight_row = expert.to(tl.int64) * (2 * INNER) + column % 2 * INNER + inner
    total = _product(
        x + row.to(tl.int64) * x_stride,
        gate_up + weight_row * width,
        is_row,
        inner < INNER,
        width,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_N,
        EVEN_K,
    )
    rounded = total.to(gate_up.dtype.element_ty)
    gate, up = tl.split(tl.reshape(rounded, [BLOCK_M, BLOCK_N // 2, 2]))
    inner = part + tl.arange(0, BLOCK_N // 2)
    target = out + place.to(tl.int64)[:, None] * INNER + inner[None, :]
    inside = is_row[:, None] & (inner < INNER)[None, :]
    tl.store(target, activated(gate, up, GELU), mask=inside)


@triton.jit
def expert_down_kernel(
    inner,
    down,
    starts,
    out,
    width,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Write the expert's result of every place, out [places, COLUMNS]; inner is [places, width]."""
    across: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // across
    expert, place, is_row = _tile_of(starts, tile, EXPERTS, BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    column = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _product(
        inner + place.to(tl.int64) * width,
        down + (expert.to(tl.int64) * COLUMNS + column) * width,
        is_row,
        column < COLUMNS,
        width,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_N,
        EVEN_K,
    )
    target = out + place.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    inside = is_row[:, None] & (column < COLUMNS)[None, :]
    tl.store(target, total.to(down.dtype.element_ty), mask=inside)


@triton.jit
def combine_experts_kernel(
    results,
    weights,
    places,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Write the weighted sum of each row's results, out [T, WIDTH]; results is [places, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(TOP_K):
        place = tl.load(places + row * TOP_K + slot)
        start = results + place.to(tl.int64) * WIDTH + columns
        result = tl.load(start, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        total += result * tl.load(weights + row * TOP_K + slot)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)


@chosen_once
def _launch_gate_up(
    config: ProductTiles, inner: int, width: int, experts: int, activation: str
) -> CachedLaunch:
    own = {"INNER": inner, "GELU": activation == "gelu_tanh"}
    constants = own | config.constants(2 * inner, width, experts)
    return CachedLaunch(expert_gate_up_kernel, constants, config.options(), dtypes=(0, 2, 3))


@chosen_once
def _launch_down(config: ProductTiles, width: int, inner: int, experts: int) -> CachedLaunch:
    constants = {"COLUMNS": width} | config.constants(width, inner, experts)
    return CachedLaunch(expert_down_kernel, constants, config.options(), dtypes=(0, 2))


def _combined(width: int) -> int:
    """Columns of a program of `combine_experts_kernel`."""
    return min(COMBINED, next_power_of_two(width))


@chosen_once
def _launch_combine(width: int, top_k: int) -> CachedLaunch:
    block = _combined(width)
    constants = {"WIDTH": width, "BLOCK": block, "TOP_K": top_k}
    return CachedLaunch(
        combine_experts_kernel, constants, {"num_warps": row_warps(block)}, dtypes=(0, 1, 2)
    )


def expert_mlp(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    gate_up, down = gate_up.contiguous(), down.contiguous()
    (experts, width, inner), places = down.shape, len(routing.rows)
    config = config_for(arch_of(x), x.dtype)
    tiles = most_tiles(places, experts, config.BLOCK_M)
    middle = torch.empty((places, inner), dtype=x.dtype, device=x.device)
    results = torch.empty((places, width), dtype=x.dtype, device=x.device)
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    if places == 0:
        return out
    _launch_gate_up(config, inner, width, experts, activation)(
        (tiles * triton.cdiv(2 * inner, config.BLOCK_N), 1),
        (x, gate_up, routing.rows, routing.starts, middle),
        (x.stride(0), width),
    )
    _launch_down(config, width, inner, experts)(
        (tiles * triton.cdiv(width, config.BLOCK_N), 1),
        (middle, down, routing.starts, results),
        (inner,),
    )
    _launch_combine(width, routing.places.shape[1])(
        (len(x), triton.cdiv(width, _combined(width))),
        (results, routing.weights, routing.places, out),
        (),
    )
    return out
