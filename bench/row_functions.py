"""Time the row-wise functions of a decoder on this CPU: eager torch, torch.compile, and C.

.venv/bin/python -P bench/row_functions.py [--rows 20,1024] [--dtype float32] [--repeat 11]

All three run in turn, with one thread; the median of CPU milliseconds of a call is printed, which
other work on the machine disturbs less than wall time. Shapes are those of Qwen3-0.6B.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from report import machine, table

from gpuscore.backends.torch.layers import add_and_norm, gated, norm_and_rotate
from gpuscore.backends.torch.linear import unsigned
from gpuscore.backends.torch.rows_in_c import in_c
from gpuscore_kernels.partial_attention import merge_partials

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 1024, 3072, 16, 8, 128
WAYS = ("eager", "torch.compile", "C")


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    c, rows = in_c(dtype), []
    for count in options.rows:
        for function, name, arguments_of in cases(count, dtype):
            ways = function, torch.compile(function, dynamic=True), c(function)
            times = in_turn(ways, arguments_of, options.repeat)
            rows.append({"rows": count, "function": name} | dict(zip(WAYS, times, strict=True)))
    print(f"{options.dtype}, median CPU ms of a call, one thread; {machine()}\n\n{table(rows)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=lambda x: [int(n) for n in x.split(",")], default=[20, 1024])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeat", type=int, default=11)
    return parser.parse_args()


def cases(count: int, dtype: torch.dtype) -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """Yield functions, their names, and functions that make their arguments."""
    x, delta = (torch.randn(count, HIDDEN).to(dtype) for _ in range(2))
    weight, norm = torch.randn(HIDDEN).to(dtype), torch.randn(DIM).to(dtype)
    qkv = torch.randn(count, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    tables = torch.randn(count, DIM // 2), torch.randn(count, DIM // 2)
    gate_up = 3 * torch.randn(count, 2 * INNER).to(dtype)
    out, o = torch.randn(count, HEADS, DIM).to(dtype), torch.randn(HEADS, count, DIM).to(dtype)
    lse, o_lse = torch.randn(count, HEADS), torch.randn(count, HEADS)
    yield add_and_norm, "sum and norm", lambda: (x, delta, weight, 1e-6, False)
    heads = HEADS, KV_HEADS
    yield (
        norm_and_rotate,
        "QK norm, rotary",
        lambda: (qkv, *tables, norm, norm, 1e-6, False, *heads),
    )
    yield gated, "SwiGLU", lambda: (gate_up, "silu")
    yield gated, "GeGLU", lambda: (gate_up, "gelu_tanh")
    yield merge_partials, "merge", lambda: (out.clone(), lse.clone(), o.transpose(0, 1), o_lse)
    yield unsigned, "rows to INT8", lambda: (x,)


@torch.inference_mode()
def in_turn(ways: tuple[Any, ...], make: Callable[[], Any], repeat: int) -> list[float]:
    taken: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way(*make())  # compiled now
    for _ in range(repeat):
        for way, times in zip(ways, taken, strict=True):
            given = make()
            start = time.process_time()
            way(*given)
            times.append(1e3 * (time.process_time() - start))
    return [round(statistics.median(times), 3) for times in taken]


if __name__ == "__main__":
    main()
