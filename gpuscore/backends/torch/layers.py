"""Pure functions of the decoder, and ways to call them on a batch's rows: all at once or in tiles.

Shapes: T rows, E hidden size, H heads, D head size. Rounding points are the same for every dtype:
norms, the rotary embedding and act(gate) * up compute in float32 and round their result once;
projections are in the model's dtype, the residual stream in float32.

Matrix products, reductions and even element-wise functions need not give a row the same bits when
the number of rows changes: libraries choose other loops, and vectors end elsewhere. With tiles of
one shape they do, so a row's result does not depend on the rest of the batch (Thinking Machines,
"Defeating nondeterminism in LLM inference", 2025). `--deterministic` chooses tiles, and threads
that share their work evenly.
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.ropes import Llama3Rope, Rope, YarnRope
from gpuscore.backends.torch.compiler import FunctionT
from gpuscore_kernels import reference
from gpuscore_kernels.label_head import tile_shapes
from gpuscore_kernels.reference import QkvHeads


def norm_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: QkvHeads
) -> tuple[Tensor, Tensor, Tensor]:
    """Split and rotate as `reference.norm_and_rotate`. If a head's key or value is not finite,
    write NaN to the key and 0 to the value, in qkv's own memory.

    Attention overwrites the scores of masked keys, so the NaN reaches only the rows that see the
    key. `qk_norm_rope_store` does the same.
    """
    q, k, v = reference.norm_and_rotate(qkv, cos, sin, heads)
    flawed = ~(k.isfinite() & v.isfinite()).all(-1, keepdim=True)
    return q, k.masked_fill_(flawed, torch.nan), v.masked_fill_(flawed, 0)


def inverse_frequencies(rope: Rope, rotated: int, head_dim: int, device: torch.device) -> Tensor:
    """Return the rotary frequency of each pair, float32 [D / 2]. It is 0 for pairs after the first
    `rotated` / 2, which are not rotated."""
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    frequencies = 1.0 / (rope.theta**exponent)
    if isinstance(rope.scaling, Llama3Rope):
        frequencies = _llama3_scaled(frequencies, rope.scaling)
    elif isinstance(rope.scaling, YarnRope):
        kept = torch.from_numpy(rope.scaling.unscaled_weights(rope.theta, rotated))
        frequencies = frequencies / rope.scaling.factor * (1 - kept) + frequencies * kept
    elif rope.scaling is not None:
        frequencies = frequencies / rope.scaling
    return functional.pad(frequencies, (0, (head_dim - rotated) // 2)).to(device)


def _llama3_scaled(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Scale as Llama 3.1: divide low frequencies by `factor`, keep high ones, ramp between."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / rope.factor)


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [T, D / 2]."""
    angles = positions.float().unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


class ByRows(Protocol):
    """Returns a form of a function that computes each row on its own.

    The function's first `count` arguments are tensors of rows, and so are its results.
    """

    def __call__(self, function: FunctionT, count: int = 1, /) -> FunctionT: ...


def all_at_once(function: FunctionT, count: int = 1, /) -> FunctionT:
    """Return the function, which computes all rows in one call."""
    return function


def in_tiles(size: int) -> ByRows:
    """Return a `ByRows` that computes `size` rows at a time; zeros pad the last tile."""

    def by_rows(function: FunctionT, count: int = 1, /) -> FunctionT:
        def tiled(*arguments: Any, **options: Any) -> Any:
            rows = arguments[:count]
            others = arguments[count:]
            total = len(rows[0])
            if total == 0:
                return function(*arguments, **options)
            results = [
                function(*(_tile(x, start, size) for x in rows), *others, **options)
                for start in range(0, total, size)
            ]
            if isinstance(results[0], Tensor):
                return torch.cat(results)[:total]
            return tuple(torch.cat(parts)[:total] for parts in zip(*results, strict=True))

        return cast(FunctionT, tiled)

    return by_rows


def _tile(rows: Tensor, start: int, size: int) -> Tensor:
    tile = rows[start : start + size]
    missing = size - len(tile)
    if missing == 0:
        return tile
    return functional.pad(tile, (0, 0) * (tile.dim() - 1) + (0, missing))


# With `--deterministic`: rows of every operator's call, and tokens of a query's chunk. It is small,
# because a small request is padded to it, and a multiple of every page size.
STEADY_ROWS = 128
EXPERT_ROWS = 32  # rows of an expert's tile; larger tiles would have more padding

GRAIN = 32768  # torch gives element-wise work one thread per this many elements, rounded up
VECTOR = 16  # elements; one or two vectors of float32, depending on the CPU


def steady_threads(config: DecoderConfig, threads: int) -> int:
    """Return the most threads, up to `threads`, that share all element-wise work evenly.

    torch computes the rest at the end of a thread's share without vectors, and functions such as
    exp then round differently. A thread's share of n elements is n / t, where t = min(threads,
    n / GRAIN rounded up). With uneven shares, rows of a tile near the ends of shares would get
    other bits. One or two threads always divide a tile's rows evenly.
    """
    sizes = list(_elements(config))
    return next(t for t in range(threads, 0, -1) if all(_is_even(size, t) for size in sizes))


def _is_even(elements: int, threads: int) -> bool:
    used = min(threads, -(-elements // GRAIN))
    return elements % (used * VECTOR) == 0 or used == 1


def _elements(config: DecoderConfig) -> Iterator[int]:
    """Yield the sizes, in elements, of all element-wise work on one tile."""
    heads = config.num_heads + 2 * config.num_kv_heads
    inner = config.intermediate_size
    for width in (config.hidden_size, heads * config.head_dim, inner, 2 * inner):
        yield STEADY_ROWS * width
    for kv in (config.num_heads, config.num_kv_heads):
        yield STEADY_ROWS * kv * config.head_dim
    if config.mixture is not None:
        yield EXPERT_ROWS * config.mixture.intermediate_size
        yield STEADY_ROWS * config.mixture.top_k * config.hidden_size
    for rows, labels in tile_shapes(STEADY_ROWS, config.label_rows, config.head_width):
        yield rows * labels
