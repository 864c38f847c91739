"""Functions in C in the place of the decoder's row-wise ones, checked when they are built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.torch.compiler import Compiler, Function, cc
from gpuscore.backends.torch.layers import add_and_norm, gated, norm_and_rotate, rms_norm
from gpuscore.backends.torch.linear import scaled, unsigned
from gpuscore.backends.torch.rounding import TOLERANCE, relative_error
from gpuscore.errors import ConfigError
from gpuscore_kernels.delta_net import Walks
from gpuscore_kernels.delta_net.reference import convolve, delta_rule, gated_norm, keep_tails
from gpuscore_kernels.extend_attention import Layout, TileShape, build_tiles, upload
from gpuscore_kernels.extend_attention.layout import Ints
from gpuscore_kernels.extend_attention.reference import extend_attention
from gpuscore_kernels.label_head import few_products
from gpuscore_kernels.quantized.reference import EPS
from gpuscore_kernels.reference import QkvHeads
from gpuscore_kernels.row_functions import (
    KEYS,
    AttentionFunctions,
    BuildError,
    DeltaFunctions,
    RowFunctions,
    build,
    built_ahead,
    load,
)

ROWS = 33  # rows of the known answers
EPS_OF_NORMS = 0.3  # large enough to be seen
Answer = tuple[Tensor, ...]


def in_c(dtype: torch.dtype) -> Compiler:
    """Compile the functions for rows of `dtype`, and check each with a known answer.

    Returns:
        a function that returns the form in C of one of this module's row-wise functions.

    Raises:
        ConfigError: the functions cannot be compiled or loaded, or one does not agree with its
            reference.
    """
    try:
        ahead = built_ahead(dtype)
        library = build(cc(), dtype) if ahead is None else load(ahead)
    except BuildError as error:
        raise ConfigError(f"{error}; choose --compile off, or another compiler in CC") from error
    forms = _forms(RowFunctions(library, dtype), dtype)
    forms |= _of_linear_layers(DeltaFunctions(library, dtype))
    forms[extend_attention] = AttentionFunctions(library, dtype).extend_attention
    with torch.inference_mode():
        for function, arguments in (
            *_known(dtype),
            *_known_of_linear_layers(dtype),
            *_known_attention(dtype),
        ):
            expected = _as_tuple(function(*map(_copied, arguments)))
            with _filled_memory():
                got = _as_tuple(forms[function](*map(_copied, arguments)))
            for reference, result in zip(expected, got, strict=True):
                allowed = TOLERANCE.get(reference.dtype, TOLERANCE[torch.float32])
                distance = relative_error(result, reference)
                if not distance <= allowed:
                    raise ConfigError(
                        "--compile computes something else than the reference on this machine in "
                        f"{function.__name__}: the relative error of a known answer is "
                        f"{distance:.1e}, allowed {allowed:.0e}; choose another --compile"
                    )
    return lambda function: forms[function]


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Let torch fill new tensors with NaN or the largest integer.

    Without the filling, a number that a function does not write could be right by chance: the
    memory may hold an earlier computation of the same answer.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # the other way to ask for it imports a compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _forms(functions: RowFunctions, dtype: torch.dtype) -> dict[Function, Callable[..., Any]]:
    return {
        rms_norm: functions.rms_norm,
        add_and_norm: functions.add_and_norm,
        norm_and_rotate: functions.norm_and_rotate,
        gated: functions.gated,
        unsigned: lambda x: functions.quantize_rows(x, EPS),
        few_products: functions.products if dtype == torch.bfloat16 else few_products,
        scaled: lambda y, scale, bias, dtype: functions.scale_rows(y, scale, bias),
    }


def _of_linear_layers(functions: DeltaFunctions) -> dict[Function, Callable[..., Any]]:
    return {
        convolve: functions.convolve,
        keep_tails: keep_tails,  # few rows
        delta_rule: functions.delta_rule,
        gated_norm: functions.gated_norm,
    }


def _known(dtype: torch.dtype) -> Iterator[tuple[Function, tuple[Any, ...]]]:
    """Yield each function with arguments, of odd sizes: vectors end within rows and heads."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, delta, weight = (rows(*shape).to(dtype) for shape in ((ROWS, 83), (ROWS, 83), (83,)))
    stream = rows(ROWS, 83)
    for one_plus in (False, True):
        yield rms_norm, (x, weight, EPS_OF_NORMS, one_plus)
        yield rms_norm, (stream, weight, EPS_OF_NORMS, one_plus)
        yield add_and_norm, (x, delta, weight, EPS_OF_NORMS, one_plus)
        yield add_and_norm, (stream, delta, weight, EPS_OF_NORMS, one_plus)
    heads, size = 3, 38
    qkv, norm = rows(ROWS, (heads + 4) * size).to(dtype), rows(size).to(dtype)
    tables = rows(ROWS, size // 2), rows(ROWS, size // 2)
    for own in (norm, None):
        yield norm_and_rotate, (qkv, *tables, QkvHeads(heads, 2, own, own, EPS_OF_NORMS))
    for activation in ("silu", "gelu_tanh"):
        yield gated, (3 * rows(ROWS, 2 * 83).to(dtype), activation)
    yield few_products, (rows(7, 83).to(dtype), rows(ROWS + 1, 83).to(dtype))
    yield unsigned, (x,)
    yield scaled, (rows(ROWS, 83), rows(ROWS), weight, dtype)


def _known_of_linear_layers(dtype: torch.dtype) -> Iterator[tuple[Function, tuple[Any, ...]]]:
    """Yield the functions of linear layers: two key heads of three value heads each."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys, size, values, heads = 2 * 22, 22, 37, 6
    columns = 2 * keys + heads * values
    mixed, tails = rows(ROWS, columns + 5).to(dtype)[:, :columns], rows(2, 3, columns).to(dtype)
    places = torch.randint(-1 - 6, ROWS, (ROWS, 3), generator=generator).int()
    yield convolve, (mixed, tails, places, rows(4, columns), keys, size)
    gate = rows(ROWS, heads * values).to(dtype)
    yield gated_norm, (rows(ROWS, heads, values), gate, rows(37), 0.3)
    convolved = rows(ROWS, columns)
    convolved[:, : 2 * keys] *= 0.3
    # Two walks that begin with a state and with zeros, and two that continue the first one.
    chunks = [[0, -1, -1, -1], [11, -2, 0, -1], [18, -1, -1, -1], [29, 1, -1, -1]]
    chunks += [[31, -1, -1, -1], [ROWS, -1, -1, -1]]
    chains = [[0, 2, 3], [2, 3, -1], [3, 4, -2], [4, 5, 0]]
    starts, walked = torch.tensor(chunks).int(), torch.tensor(chains).int()
    lengths = starts[:, 0].diff()
    begins = starts[:-1, 0].repeat_interleave(lengths)
    walks = Walks(starts, walked, begins, levels=(2, 0, 2), held=1)
    gates = rows(ROWS, 2 * heads + 3).to(dtype)[:, : 2 * heads]
    of_heads = -rows(heads).abs(), rows(heads)
    yield delta_rule, (convolved, gates, *of_heads, walks, rows(4, 2, size, 3 * values))


def _known_attention(dtype: torch.dtype) -> Iterator[tuple[Function, tuple[Any, ...]]]:
    """Yield attention of a root behind 21 cached tokens, of two items below it and one below these,
    in two tiles of queries, with three heads for each of two KV heads."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def ints(values: Any) -> Ints:
        return np.asarray(values, np.int32)

    lengths, starts = (20, 9, 5, 3), (21, 41, 41, 46)
    positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
    ends = ints(np.cumsum((0, *lengths)))
    tree = ints((-1, 0, 0, 2)), ints((0, 0, 0, 0))
    layout = Layout(ints(positions), ends, *tree, ints([21]), ints([[2, 0]]), KEYS)
    for window, softcap in ((None, None), (11, 1.5)):
        table = build_tiles(layout, TileShape(19, KEYS, KEYS), window=window)
        q, k, v = (rows(int(ends[-1]), heads, 38) for heads in (6, 2, 2))
        pool = rows(2, 3 * KEYS, 38), rows(2, 3 * KEYS, 38)
        (tiles,) = upload([table], torch.device("cpu"))
        yield extend_attention, ((q, k, v), pool, tiles, 0.2, softcap)


def _copied(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument


def _as_tuple(answer: Tensor | Answer) -> Answer:
    return (answer,) if isinstance(answer, Tensor) else answer
