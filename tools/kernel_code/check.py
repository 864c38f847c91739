"""Gate on the generated code: compile every shipped Triton kernel for every architecture, without
a GPU, and read what the compiler has made of it.

    python -P -m kernel_code            # what `make test-all` compiles
    python -P -m kernel_code --all      # everything
    python -P -m kernel_code --update   # everything; rewrites the baselines
    python -P -m kernel_code --facts    # as JSON, one line per variant

A variant fails if it does not compile, spills registers, exceeds a limit, waits for copies that
could be under way (`Variant.loops`), or is worse than its kernel's baseline (`rules.py`).
Each version of Triton has baselines of its own, because it makes other code.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import gpuscore_kernels
from gpuscore_kernels.variant import Variant
from kernel_code.compiled import facts_of, triton_version
from kernel_code.facts import CodeFacts
from kernel_code.rules import Row, complaints, row

CACHE = Path(".cache/kernels")  # of the working directory
PACKAGE = Path(gpuscore_kernels.__file__).parent
BASELINES = Path(__file__).with_name("baselines")
Baseline: TypeAlias = Mapping[str, Row]

# Kernel's folder, variant's name, architecture. A compiling process finds the variant by these.
Key: TypeAlias = tuple[str, str, int]
Result: TypeAlias = tuple[Key, CodeFacts | str]  # or the error as text


def baseline_path(kernel: str, triton: str) -> Path:
    return BASELINES / f"{kernel}.{triton}.json"


def read_baseline(kernel: str, triton: str) -> Baseline:
    """Rows of a kernel's folder; none where there is no file for this version of Triton."""
    path = baseline_path(kernel, triton)
    rows: Baseline = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return rows


def kernels() -> list[str]:
    """Folders with Triton kernels."""
    return [
        module.name
        for module in pkgutil.iter_modules([str(PACKAGE)])
        if module.ispkg and (PACKAGE / module.name / "triton.py").is_file()
    ]


@cache
def variants(kernel: str) -> Mapping[str, Variant]:
    """The variants of a kernel's folder by name."""
    module = importlib.import_module(f"gpuscore_kernels.{kernel}.triton")
    listed = list(module.variants())
    by_name = {variant.name: variant for variant in listed}
    if len(by_name) < len(listed):
        raise ValueError(f"{kernel}: two variants have one name")
    return by_name


def keys(*, quick: bool, version: str | None = None) -> Iterator[Key]:
    """All variants, or the quick ones and the widest of a Triton (default: this one)."""
    for kernel in kernels():
        for variant in variants(kernel).values():
            for arch in variant.arches:
                if not quick or arch in variant.quick:
                    yield kernel, variant.name, arch
    if quick:
        for kernel, name, arch in widest(version or triton_version()):
            if arch not in variants(kernel)[name].quick:
                yield kernel, name, arch


def widest(version: str) -> list[Key]:
    """Return, for each function and its types of arguments, the variant with the most registers.

    Its code is the first to spill. Registers come from the last `--update` with this Triton.
    """
    most: dict[tuple[object, ...], tuple[tuple[int, ...], Key]] = {}
    for key in keys(quick=False):
        kernel, name, arch = key
        variant, known = variants(kernel)[name], read_baseline(kernel, version).get(label(key), {})
        size = tuple(known.get(what, 0) for what in ("stack", "registers", "shared"))
        group = (variant.kernel, *sorted(variant.signature.items()))
        if group not in most or size > most[group][0]:
            most[group] = size, key
    return [key for _, key in most.values()]


def label(key: Key) -> str:
    """Name of a key's row in its kernel's baseline."""
    return f"{key[1]} sm_{key[2]}"


def _measure_key(key: Key, cache_folder: Path | None) -> CodeFacts | str:
    kernel, name, arch = key
    try:
        return facts_of(variants(kernel)[name], arch, cache_folder)
    except Exception as error:  # noqa: BLE001  Triton's errors have no common base
        return f"{type(error).__name__}: {error}"


def measure_all(
    chosen: Sequence[Key], processes: int, cache_folder: Path | None
) -> Iterator[Result]:
    """Yield each key and its result, in order; with `processes` 1 all compile in this process."""
    measure = partial(_measure_key, cache_folder=cache_folder)
    if processes == 1:
        yield from ((key, measure(key)) for key in chosen)
        return
    # Triton is not safe to fork once LLVM has run, which it has not here. Forked processes need not
    # import torch and Triton again, some seconds each.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from zip(chosen, pool.map(measure, chosen), strict=True)


def write_baselines(results: Sequence[Result]) -> None:
    for kernel in kernels():
        lines = ",\n".join(
            f"  {json.dumps(label(key))}: {json.dumps(row(got))}"
            for key, got in results
            if key[0] == kernel and isinstance(got, CodeFacts)
        )
        path = baseline_path(kernel, triton_version())
        path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def check(results: Iterable[Result], baselines: Mapping[str, Baseline]) -> int:
    """Print a few lines per result; return how many failed."""
    failed = 0
    for key, got in results:
        kernel, name, arch = key
        if isinstance(got, str):
            numbers, problems = ["not compiled"], [got]
        else:
            known = baselines[kernel].get(label(key))
            problems = complaints(variants(kernel)[name], got, known)
            numbers = list(_described(got))
        print(f"{kernel} {label(key)}: {numbers[0]}{': FAILED' if problems else ''}", flush=True)
        for line in (*numbers[1:], *(f"FAILED: {complaint}" for complaint in problems)):
            print(f"  {line}")
        failed += bool(problems)
    return failed


def _described(facts: CodeFacts) -> Iterator[str]:
    yield (
        f"{facts.registers} registers, {facts.stack} B stack, {facts.shared} B shared, "
        f"{facts.resident} blocks of {facts.warps} warps per multiprocessor, outside of loops "
        f"{facts.instructions} instructions, {facts.accesses[0]} accesses of 16 B, "
        f"{facts.accesses[1]} narrower"
    )
    for loop in facts.loops:
        if loop.products:
            yield (
                f"{loop.header}: {loop.in_flight} groups in flight, {loop.copies} copies of "
                f"{loop.copy_bytes} B, {loop.wgmma} wgmma, {loop.mma} mma, {loop.mufu} MUFU, "
                f"{loop.loads} loads, {loop.issue} issue slots"
            )


def stale(chosen: Sequence[Key]) -> list[str]:
    """Rows of the baselines without a variant."""
    present = {(key[0], label(key)) for key in chosen}
    return [
        f"{name} in {baseline_path(kernel, triton_version()).name} of {kernel}"
        for kernel in kernels()
        for name in read_baseline(kernel, triton_version())
        if (kernel, name) not in present
    ]


def print_facts(results: Iterable[Result]) -> int:
    """Print all facts of each result as a line of JSON; return how many were not compiled."""
    failed = 0
    for (kernel, name, arch), got in results:
        what = {"kernel": kernel, "variant": name, "arch": arch}
        facts = {"error": got} if isinstance(got, str) else got.to_json()
        failed += isinstance(got, str)
        print(json.dumps(what | facts), flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 turns kernels into Python; nothing can be compiled")
        return 2
    every = options.all or options.update
    chosen = list(keys(quick=not every))
    cache_folder = None if options.no_cache else options.cache
    results = measure_all(chosen, options.processes, cache_folder)
    if options.facts:
        return 1 if print_facts(results) else 0
    if options.update:
        measured = list(results)
        write_baselines(measured)
        results = iter(measured)
    failed = check(results, {name: read_baseline(name, triton_version()) for name in kernels()})
    left = stale(chosen) if every else []
    for name in left:
        print(f"{name}: there is no such variant")
    failed += len(left)
    print(f"Triton {triton_version()}: {len(chosen)} variants, {failed} failed")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel_code")
    parser.add_argument("--all", action="store_true", help="every variant, not only the quick ones")
    parser.add_argument("--update", action="store_true", help="every variant; rewrite baselines")
    parser.add_argument("--facts", action="store_true", help="print facts as JSON, check nothing")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"folder of facts by source (default: {CACHE})"
    )
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    return parser
