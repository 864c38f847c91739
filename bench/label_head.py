"""Time the log-sum-exp over the vocabulary on this CPU, of the working tree and of another version.

.venv/bin/python -P bench/label_head.py [--other FILE] [--rows 1,10] [--threads 1] [--dtype float16]
    [--tops 5,20] [--in-c]

FILE is another version of `kernels/gpuscore_kernels/label_head/reference.py`, such as one that
`git show` wrote. Both are compared first; then they run in turn. Each row has the medians of wall
time and of CPU time, and the least wall time, which other work on the machine disturbs least.
One best token per row is asked for, and with --tops as many, too. --in-c also times the products of
few rows in C.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuscore.backends.torch.compiler import cc
from gpuscore_kernels.label_head import reference
from gpuscore_kernels.row_functions import RowFunctions, build

DISTINCT = 1024  # rows of weights that are drawn; the others repeat them, scaled, to save time


def main() -> None:
    options = _options()
    versions = {"this": _run_of(reference)}
    if options.other:
        versions["other"] = _run_of(_loaded(options.other))
    for piece in options.pieces:
        versions[f"piece {piece}"] = _run_of(reference, FEW_ROWS=1 << 30, CACHED_PIECE=1 << piece)
    if options.in_c:
        versions["in C"] = _run_of(reference, products=_products_in_c())
    for top in options.tops:
        versions[f"top {top}"] = _run_of(reference, top)
    weight = _weight(options.vocab, options.width, getattr(torch, options.dtype))
    print(f"{options.dtype}, {options.vocab} x {options.width}; median ms, wall (CPU, least wall)")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for rows in options.rows:
            hidden = torch.randn(rows, options.width).to(weight.dtype)
            _compare(versions, hidden, weight)
            times = _in_turn(versions, hidden, weight, options.repeat)
            print(f"{threads} threads, {rows} rows: {', '.join(times)}", flush=True)


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path, help="another version of reference.py")
    parser.add_argument("--rows", type=numbers, default=[1, 4, 10, 32, 100, 300, 1000])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tops", type=numbers, default=[], help="also this many best tokens")
    parser.add_argument(
        "--pieces", type=numbers, default=[], help="also pieces of 2^k elements, for any rows"
    )
    parser.add_argument("--in-c", action="store_true", help="also products in C; up to 64 rows")
    return parser.parse_args()


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("other_version", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _products_in_c() -> reference.Products:
    return RowFunctions(build(cc(), torch.bfloat16), torch.bfloat16).products


def _run_of(
    module: Any, top: int = 1, products: reference.Products | None = None, **constants: int
) -> Callable[[Tensor, Tensor], Any]:
    """Return a function that computes the statistics with other constants of the module."""
    before = {name: getattr(module, name) for name in constants}

    def run(hidden: Tensor, weight: Tensor) -> Any:
        vars(module).update(constants)
        try:
            with torch.inference_mode():
                return module.vocab_statistics(
                    hidden, weight, top, None, module.MAX_TILE, *([products] if products else [])
                )
        finally:
            vars(module).update(before)

    return run


def _weight(vocab: int, width: int, dtype: torch.dtype) -> Tensor:
    weight = torch.empty(vocab, width, dtype=dtype)
    drawn = torch.randn(DISTINCT, width).mul_(0.05)
    for start in range(0, vocab, DISTINCT):
        part = weight[start : start + DISTINCT]
        part.copy_(drawn[: len(part)] * (1 - start / (2 * vocab)))
    return weight


def _compare(versions: dict[str, Any], hidden: Tensor, weight: Tensor) -> None:
    lse, ids, logits = versions["this"](hidden, weight)
    for run in versions.values():
        found = run(hidden, weight)
        torch.testing.assert_close(found.lse, lse, rtol=0, atol=1e-5)
        best, best_ids = (
            x.reshape(len(hidden), -1)[:, :1] for x in (found.top_logits, found.top_ids)
        )
        torch.testing.assert_close(best, logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(best_ids, ids)


def _in_turn(versions: dict[str, Any], hidden: Tensor, weight: Tensor, repeat: int) -> list[str]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
    for _ in range(repeat):
        for name, run in versions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run(hidden, weight)
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return [f"{name} {_summary(times)}" for name, times in taken.items()]


def _summary(times: list[tuple[float, float]]) -> str:
    wall, cpu = ([1e3 * seconds for seconds in column] for column in zip(*times, strict=True))
    return f"{statistics.median(wall):.0f} ({statistics.median(cpu):.0f}, {min(wall):.0f})"


if __name__ == "__main__":
    main()
