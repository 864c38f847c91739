"""The convolution and the gated norm of linear layers in Triton: one program per row and block of
heads, which it holds in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.delta_net.reference import EPS
from gpuscore_kernels.launch import next_power_of_two, row_warps

BLOCK = 2048  # elements of a program: 16 heads of 128
EPSILON = tl.constexpr(EPS)


@triton.jit(do_not_specialize=["rows"])
def convolve_kernel(
    mixed,
    extra,
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
):
    """Write a block of heads of a row; the row behind the last one is zeros."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inner = tl.arange(0, BLOCK_SIZE)
    column = head[:, None] * SIZE + inner[None, :]
    inside = (inner < SIZE)[None, :] & (column < COLUMNS)
    total = tl.zeros([BLOCK_HEADS, BLOCK_SIZE], tl.float32)
    for tap in tl.static_range(TAPS):
        place = tl.load(places + row * TAPS + tap, mask=row < rows, other=0)
        own = inside & (row < rows) & (place < rows)
        kept = inside & (row < rows) & (place >= rows)
        x = tl.load(mixed + place * stride + column, mask=own, other=0.0).to(tl.float32)
        x += tl.load(extra + (place - rows) * COLUMNS + column, mask=kept, other=0.0).to(tl.float32)
        total += x * tl.load(weight + tap * COLUMNS + column, mask=inside, other=0.0)
    total *= tl.sigmoid(total)
    factor = tl.rsqrt(tl.sum(total * total, axis=1) + EPSILON)
    factor = tl.where(head * SIZE < KEYS, factor * (SIZE**-0.5), factor)
    total *= tl.where(head * SIZE < 2 * KEYS, factor, 1.0)[:, None]
    tl.store(out + row * COLUMNS + column, total, mask=inside)


@triton.jit
def gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write a block of heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inner = tl.arange(0, BLOCK_SIZE)
    column = head[:, None] * SIZE + inner[None, :]
    inside = (inner < SIZE)[None, :] & (head < HEADS)[:, None]
    value = tl.load(x + row * (HEADS * SIZE) + column, mask=inside, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / SIZE + eps)[:, None]
    value *= tl.load(weight + inner, mask=inner < SIZE, other=0.0)[None, :]
    opened = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value *= opened * tl.sigmoid(opened)
    tl.store(out + row * (HEADS * SIZE) + column, value.to(out.dtype.element_ty), mask=inside)


def _heads(heads: int, size: int) -> dict[str, int]:
    """Return the blocks of programs of rows that have `heads` heads of `size` columns."""
    wide = next_power_of_two(size)
    most = max(1, BLOCK // wide)
    return {"BLOCK_HEADS": min(next_power_of_two(heads), most), "BLOCK_SIZE": wide}


def _convolved(columns: int, taps: int, keys: int, size: int) -> dict[str, int]:
    own = {"COLUMNS": columns, "TAPS": taps, "KEYS": keys, "SIZE": size}
    return own | _heads(triton.cdiv(columns, size), size)


def _normed(heads: int, size: int) -> dict[str, int]:
    return {"HEADS": heads, "SIZE": size} | _heads(heads, size)


def _warps(constants: dict[str, int]) -> int:
    return row_warps(constants["BLOCK_HEADS"] * constants["BLOCK_SIZE"])


# These also return the number of programs of a row.


@chosen_once
def _launch_convolve(*choices: int) -> tuple[CachedLaunch, int]:
    constants = _convolved(*choices)
    heads, options = constants["BLOCK_HEADS"], {"num_warps": _warps(constants)}
    launch = CachedLaunch(convolve_kernel, constants, options, free=1, dtypes=(0,))
    return launch, triton.cdiv(constants["COLUMNS"], heads * constants["SIZE"])


@chosen_once
def _launch_norm(*choices: int) -> tuple[CachedLaunch, int]:
    constants = _normed(*choices)
    options = {"num_warps": _warps(constants)}
    launch = CachedLaunch(gated_norm_kernel, constants, options, dtypes=(1,))
    return launch, triton.cdiv(constants["HEADS"], constants["BLOCK_HEADS"])


def convolve(
    mixed: Tensor, extra: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    rows, columns = mixed.shape
    out = torch.empty((rows + 1, columns), dtype=torch.float32, device=mixed.device)
    launch, programs = _launch_convolve(columns, len(weight), keys, size)
    launch((rows + 1, programs), (mixed, extra, places, weight, out), (rows, mixed.stride(0)))
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, heads, size = x.shape
    out = torch.empty((rows, heads * size), dtype=gate.dtype, device=gate.device)
    launch, programs = _launch_norm(heads, size)
    if rows:
        launch((rows, programs), (x, gate, weight, out), (gate.stride(0), eps))
    return out
