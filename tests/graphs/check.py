"""Runs the CUDA launcher on a simulated device, and compares what it does with a baseline.

    make check-graphs
    make check-graphs ARGS='--model Llama-3.1-8B'
    make check-graphs ARGS=--update     # writes the counts to baseline.json

It fails on everything that a capture forbids, on kernels compiled after the warm-up, on offsets
that may leave 32 bits, on memory that start-up did not count, and on counts of launches, host waits
and compiled kernels other than the baseline's.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  (some operators on meta tensors import it; children need not)

from graphs.examine import Examination, examine
from graphs.models import MODELS, Model

BASELINE = Path(__file__).with_name("baseline.json")


def changes(got: Any, known: Any, where: str = "") -> Iterator[str]:
    """Yield every number and text that differs from the baseline's."""
    if isinstance(got, Mapping) and isinstance(known, Mapping):
        for name in dict.fromkeys((*known, *got)):
            place = f"{where} / {name}" if where else name
            yield from changes(got.get(name), known.get(name), place)
    elif got != known:
        yield f"{where}: {got}, the baseline says {known}"


def read_baseline() -> dict[str, Any]:
    baseline: dict[str, Any] = json.loads(BASELINE.read_text()) if BASELINE.is_file() else {}
    return baseline


def complaints(examination: Examination, baseline: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a model's examination; empty if nothing is."""
    known = baseline.get(examination.model)
    if known is None:
        return [
            *examination.problems,
            f"{BASELINE.name} has no counts of it; write them with --update",
        ]
    return examination.problems + list(changes(examination.counts, known))


def examine_all(chosen: Sequence[Model], processes: int) -> Iterator[Examination]:
    """Yield the examination of each model, in order; each process examines one at a time."""
    # Triton is not safe to fork once LLVM has run, which it has not here. Forked processes need not
    # import torch, its compiler, which some operators on meta tensors need, and Triton again.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(examine, chosen)


def show(examination: Examination, wrong: Sequence[str]) -> None:
    graphs, kernels = examination.counts["graphs"], examination.counts["kernels compiled"]
    of_graph = examination.counts["launches of a graph"]
    of_layer = sum(examination.counts["launches of a layer"].values())
    each = f" of {of_graph} launches, {of_layer} per layer"
    end = ": FAILED" if wrong else ""
    print(f"{examination.model}: {kernels} kernels, {graphs} graphs{each}{end}")
    for line in (*examination.notes, *wrong):
        print(f"  {line}")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check-graphs")
    parser.add_argument("--model", action="append", choices=[model.name for model in MODELS])
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--update", action="store_true", help="rewrite the baseline")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 turns kernels into Python; nothing can be compiled")
        return 2
    baseline, failed = read_baseline(), 0
    chosen = [model for model in MODELS if not options.model or model.name in options.model]
    for examination in examine_all(chosen, options.processes):
        if options.update:
            baseline[examination.model] = examination.counts
        wrong = complaints(examination, baseline)
        show(examination, wrong)
        failed += bool(wrong)
    if options.update:
        BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")
    print(f"{len(chosen)} models examined, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
