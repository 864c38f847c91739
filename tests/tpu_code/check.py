"""Compiles the programs of `--backend jax` for TPUs that are not there, and checks the code.

    make check-tpu                      # every program, on v5e and v6e
    make check-tpu ARGS=--quick         # what make test-all compiles
    make check-tpu ARGS=--update        # every program; rewrites baseline.json

It needs libtpu beside JAX, which `make check-tpu` installs in an environment of its own.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

from tpu_code import environment  # noqa: F401  (before JAX is imported)
from tpu_code.cases import (
    EXTEND,
    MODELS,
    Case,
    batch_bytes,
    cases,
    page_count,
    plan_of,
    quick_cases,
)
from tpu_code.chips import CHIPS
from tpu_code.facts import Facts, measure, versions
from tpu_code.rules import Planned, Row, complaints, row

BASELINE = Path(__file__).with_name("baseline.json")
CACHE = Path(".cache/tpu")  # of the working directory
Result: TypeAlias = tuple[Case, Facts | str]  # or the error as text


def planned_of(case: Case) -> Planned:
    plan = plan_of(case.model, case.chip)
    return Planned(
        plan.weight_bytes,
        page_count(plan, CHIPS[case.chip]) * plan.pages.page_bytes,
        batch_bytes(plan),
        plan.architecture.config.tie_word_embeddings,
    )


def wrong_with(case: Case, got: Facts | str, baseline: Mapping[str, Row]) -> list[str]:
    """Return what is wrong with a program; empty if nothing is."""
    if isinstance(got, str):
        return [got]
    known = baseline.get(case.name)
    chip = CHIPS[case.chip]
    return complaints(got, planned_of(case), chip, known, extends=case.part == EXTEND)


def measure_all(chosen: Sequence[Case], processes: int, cache: Path | None) -> Iterator[Result]:
    """Yield each program and its facts, in order."""
    if processes == 1:
        yield from ((case, measure(case, cache)) for case in chosen)
        return
    # libtpu and JAX have threads, which a forked process would lack.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from zip(chosen, pool.map(partial(measure, cache=cache), chosen), strict=True)


def read_baseline() -> dict[str, Row]:
    rows: dict[str, Row] = json.loads(BASELINE.read_text()) if BASELINE.is_file() else {}
    return rows


def write_baseline(rows: Mapping[str, Row]) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    BASELINE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def check(results: Iterable[Result], baseline: Mapping[str, Row]) -> int:
    """Print some lines per program; return how many failed."""
    failed = 0
    for case, got in results:
        wrong = wrong_with(case, got, baseline)
        print(f"{case.name}{': FAILED' if wrong else ''}", flush=True)
        lines = [] if isinstance(got, str) else list(described(case, got))
        for line in (*lines, *(f"FAILED: {complaint}" for complaint in wrong)):
            print(f"  {line}")
        failed += bool(wrong)
    return failed


def described(case: Case, facts: Facts) -> Iterator[str]:
    mebibytes = 2**20
    yield (
        f"{facts.temporary / mebibytes:.1f} MiB of temporaries, "
        f"{facts.results / mebibytes:.1f} MiB of results, "
        f"{facts.aliased / mebibytes:.0f} MiB in place"
    )
    if case.part == EXTEND:
        yield f"layer: {', '.join(f'{n} {opcode}' for opcode, n in facts.layer.items() if n)}"
    for kernel in facts.kernels:
        yield (
            f"kernel {kernel.declared.name}: {kernel.declared.scalar / 1024:.0f} KiB of SMEM, "
            f"{kernel.taken / mebibytes:.1f} MiB of VMEM"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if find_spec("libtpu") is None:
        print("libtpu is not installed beside this Python; make check-tpu installs it")
        return 2
    start = time.monotonic()
    every = not (options.quick or options.only)
    chosen = quick_cases() if options.quick else list(cases(MODELS))
    chosen = [case for case in chosen if options.only in case.name]
    results = measure_all(chosen, options.processes, None if options.no_cache else CACHE)
    baseline = read_baseline()
    if options.update:
        measured = list(results)
        rows: dict[str, Row] = {
            case.name: row(got) for case, got in measured if isinstance(got, Facts)
        }
        baseline = rows if every else baseline | rows
        write_baseline(baseline)
        results = iter(measured)
    failed = check(results, baseline)
    if every:
        for name in baseline.keys() - {case.name for case in chosen}:
            print(f"{name} in {BASELINE.name}: there is no such program")
            failed += 1
    seconds = time.monotonic() - start
    print(f"{versions()}: {len(chosen)} programs, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check-tpu")
    parser.add_argument("--quick", action="store_true", help="only what make test-all compiles")
    parser.add_argument("--only", default="", help="only programs with this text in their names")
    parser.add_argument("--update", action="store_true", help="rewrite the baseline")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
