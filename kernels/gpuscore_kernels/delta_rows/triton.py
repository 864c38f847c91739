"""Functions of rows of linear layers in Triton: one program per row and block of heads, or of
columns, which it holds in registers."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuscore_kernels.cached_launch import CachedLaunch, chosen_once
from gpuscore_kernels.delta_net.reference import EPS
from gpuscore_kernels.launch import next_power_of_two, row_warps

BLOCK = 2048  # elements of a program: 16 heads of 128
ROWS = 4  # of a program that convolves
EPSILON = tl.constexpr(EPS)


@triton.jit
def row_at(mixed, tails, place, stride, column, inside, COLUMNS: tl.constexpr):
    """Return a row of the batch, or a kept one, or zeros."""
    own = tl.load(mixed + place * stride + column, mask=inside & (place >= 0), other=0.0)
    from_tails = tails + (-2 - place) * COLUMNS + column
    # Of these, one is read at most.
    return own + tl.load(from_tails, mask=inside & (place < -1), other=0.0)


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
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inner = tl.arange(0, BLOCK_SIZE)
    column = head[:, None] * SIZE + inner[None, :]
    inside = (inner < SIZE)[None, :] & (column < COLUMNS)
    weights = nothing()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(weight + tap * COLUMNS + column, mask=inside, other=0.0),)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, min(first + ROWS, rows)):
        total = tl.zeros([BLOCK_HEADS, BLOCK_SIZE], tl.float32)
        for tap in tl.static_range(TAPS):
            place = row
            if tap + 1 < TAPS:
                place = tl.load(places + row * (TAPS - 1) + tap).to(tl.int64)
            x = row_at(mixed, tails, place, stride, column, inside, COLUMNS)
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
    column = tl.program_id(1) * SIZE + tl.arange(0, BLOCK_SIZE)
    entry = kept + tl.program_id(0) * TAPS
    slot, inside = tl.load(entry).to(tl.int64), column < COLUMNS
    for tap in tl.static_range(TAPS - 1):
        place = tl.load(entry + tap + 1).to(tl.int64)
        row = row_at(mixed, tails, place, stride, column, inside, COLUMNS)
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
    return {"SIZE": size, "BLOCK_HEADS": min(next_power_of_two(heads), most), "BLOCK_SIZE": wide}


def _launch(
    kernel: Any, constants: dict[str, int], columns: int, dtypes: tuple[int, ...], free: int = 0
) -> tuple[CachedLaunch, int]:
    """Return a launch, and the number of programs of a row."""
    options = {"num_warps": row_warps(constants["BLOCK_HEADS"] * constants["BLOCK_SIZE"])}
    programs = triton.cdiv(columns, constants["BLOCK_HEADS"] * constants["SIZE"])
    return CachedLaunch(kernel, constants, options, free=free, dtypes=dtypes), programs


@chosen_once
def _convolve(columns: int, taps: int, keys: int, size: int) -> tuple[CachedLaunch, int]:
    own = {"COLUMNS": columns, "TAPS": taps, "KEYS": keys}
    constants = own | _heads(triton.cdiv(columns, size), size) | {"ROWS": ROWS}
    return _launch(convolve_kernel, constants, columns, (0,), free=1)


@chosen_once
def _keep(columns: int, taps: int) -> tuple[CachedLaunch, int]:
    constants = {"COLUMNS": columns, "TAPS": taps} | _heads(1, BLOCK)
    return _launch(keep_tails_kernel, constants, columns, (0,))


@chosen_once
def _norm(heads: int, size: int) -> tuple[CachedLaunch, int]:
    return _launch(gated_norm_kernel, {"HEADS": heads} | _heads(heads, size), heads * size, (1,))


def convolve(
    mixed: Tensor, tails: Tensor, places: Tensor, weight: Tensor, keys: int, size: int
) -> Tensor:
    rows, columns = mixed.shape
    out = torch.empty((rows, columns), dtype=mixed.dtype, device=mixed.device)
    launch, programs = _convolve(columns, len(weight), keys, size)
    tensors = mixed, tails, places, weight, out
    launch((triton.cdiv(rows, ROWS), programs), tensors, (rows, mixed.stride(0)))
    return out


def keep_tails(mixed: Tensor, tails: Tensor, kept: Tensor) -> None:
    launch, programs = _keep(mixed.shape[1], kept.shape[1])
    launch((len(kept), programs), (mixed, tails, kept), (mixed.stride(0),))


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, heads, size = out.shape
    result = torch.empty((rows, heads * size), dtype=gate.dtype, device=gate.device)
    launch, programs = _norm(heads, size)
    launch((rows, programs), (out, gate, weight, result), (gate.stride(0), eps))
    return result
