"""Compiles every shipped Triton kernel for every architecture, without a GPU, and reads the result.

    python -P -m gpuscore_kernels.compile_check            # what `make test-all` compiles
    python -P -m gpuscore_kernels.compile_check --all      # everything
    python -P -m gpuscore_kernels.compile_check --update   # everything; rewrites the baselines

Triton's wheel contains ptxas, cuobjdump and nvdisasm, so registers, stack, shared memory and the
kind of matrix instruction can be read without a GPU. A variant fails if it does not compile, uses
more stack (spilled registers) than it is allowed, more shared memory than a block may have, over
10 % more registers than its kernel's `compile_baseline.json` says, or no wgmma although it must.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from gpuscore_kernels.variant import Variant

# Bytes of shared memory that one block may have (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
REGISTER_GROWTH = 1.1
PACKAGE = Path(__file__).parent
BASELINE = "compile_baseline.json"


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """Resources of a compiled variant; sizes in bytes."""

    registers: int
    stack: int
    shared: int
    hgmma: int  # instructions
    hmma: int  # instructions


# Kernel's folder, variant's name, architecture. A compiling process finds the variant by these.
Key: TypeAlias = tuple[str, str, int]
Baseline: TypeAlias = Mapping[str, Mapping[str, int]]


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
    found = list(module.variants())
    by_name = {variant.name: variant for variant in found}
    if len(by_name) < len(found):
        raise ValueError(f"{kernel}: two variants have one name")
    return by_name


def keys(*, quick: bool) -> Iterator[Key]:
    for kernel in kernels():
        for variant in variants(kernel).values():
            for arch in variant.arches:
                if not quick or arch in variant.quick:
                    yield kernel, variant.name, arch


def label(key: Key) -> str:
    """Name of a key's row in its kernel's baseline."""
    return f"{key[1]} sm_{key[2]}"


def measure(variant: Variant, arch: int) -> CompiledCode:
    """Compile for one architecture; raises whatever Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    unknown = set(variant.signature) | set(variant.constexprs) | set(variant.divisible)
    if unknown := unknown - set(names):
        raise ValueError(f"{variant.name} names unknown arguments: {', '.join(sorted(unknown))}")
    source = ASTSource(
        variant.kernel,
        signature,
        dict(variant.constexprs),
        {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    return _inspect(compiled.asm["cubin"], compiled.asm["ptx"], int(compiled.metadata.shared))


def _inspect(cubin: bytes, ptx: str, shared: int) -> CompiledCode:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", str(path))
        # nvdisasm takes half a second; without mma in the PTX there are no matrix instructions.
        code = _tool("nvdisasm", "-c", str(path)) if "mma" in ptx else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage names no registers: {usage}")
    return CompiledCode(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=shared,
        hgmma=len(re.findall(r"\bHGMMA", code)),
        hmma=len(re.findall(r"\bHMMA", code)),
    )


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the tools in Triton's wheel."""
    from triton.backends import nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / name
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def complaints(
    variant: Variant, arch: int, got: CompiledCode, known: Mapping[str, int] | None
) -> list[str]:
    """Reasons why a compiled variant must not be shipped; `known` is its row of the baseline."""
    found = []
    if got.stack > variant.stack.get(arch, 0):
        found.append(f"{got.stack} bytes of stack, allowed: {variant.stack.get(arch, 0)}")
    if got.shared > SHARED_LIMIT[arch]:
        found.append(f"{got.shared} bytes of shared memory, the limit is {SHARED_LIMIT[arch]}")
    if variant.needs_wgmma and arch == 90 and not got.hgmma:
        found.append("no HGMMA instruction")
    if known is None:
        found.append(f"not in {BASELINE}; write it with --update")
    elif got.registers > known["registers"] * REGISTER_GROWTH:
        found.append(f"{got.registers} registers, {known['registers']} before")
    return found


def _measure_key(key: Key) -> CompiledCode | str:
    """Compile one variant; return its measurements, or the error as text."""
    kernel, name, arch = key
    try:
        return measure(variants(kernel)[name], arch)
    except Exception as error:  # noqa: BLE001  Triton's errors have no common base
        return f"{type(error).__name__}: {error}"


def measure_all(chosen: Sequence[Key], processes: int) -> Iterator[tuple[Key, CompiledCode | str]]:
    """Yield each key and its result, in order; with `processes` 1 all compile in this process."""
    if processes == 1:
        yield from ((key, _measure_key(key)) for key in chosen)
        return
    # Triton is not safe to fork once LLVM has run.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from zip(chosen, pool.map(_measure_key, chosen), strict=True)


def read_baseline(kernel: str) -> Baseline:
    path = PACKAGE / kernel / BASELINE
    rows: Baseline = json.loads(path.read_text()) if path.is_file() else {}
    return rows


def write_baselines(results: Mapping[Key, CompiledCode]) -> None:
    for kernel in kernels():
        rows = {
            label(key): {"registers": got.registers, "stack": got.stack, "shared": got.shared}
            for key, got in results.items()
            if key[0] == kernel
        }
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        (PACKAGE / kernel / BASELINE).write_text("{\n" + lines + "\n}\n")


def check(
    results: Iterable[tuple[Key, CompiledCode | str]], baselines: Mapping[str, Baseline]
) -> int:
    """Print one line per result; return how many failed."""
    failed = 0
    for key, got in results:
        kernel, name, arch = key
        if isinstance(got, str):
            numbers, found = "not compiled", [got]
        else:
            known = baselines[kernel].get(label(key))
            found = complaints(variants(kernel)[name], arch, got, known)
            numbers = (
                f"{got.registers} registers, {got.stack} B stack, {got.shared} B shared, "
                f"{got.hgmma} HGMMA, {got.hmma} HMMA"
            )
        print(f"{kernel} {label(key)}: {numbers}{': FAILED' if found else ''}", flush=True)
        for complaint in found:
            print(f"  {complaint}")
        failed += bool(found)
    return failed


def stale(chosen: Sequence[Key]) -> list[str]:
    """Rows of the baselines without a variant."""
    present = {(key[0], label(key)) for key in chosen}
    return [
        f"{kernel} {row}"
        for kernel in kernels()
        for row in read_baseline(kernel)
        if (kernel, row) not in present
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compile_check")
    parser.add_argument("--all", action="store_true", help="every variant, not only the quick ones")
    parser.add_argument("--update", action="store_true", help="every variant; rewrite baselines")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 turns kernels into Python; nothing can be compiled")
        return 2
    chosen = list(keys(quick=not (options.all or options.update)))
    results = measure_all(chosen, options.processes)
    if options.update:
        measured = list(results)
        write_baselines({key: got for key, got in measured if isinstance(got, CompiledCode)})
        results = iter(measured)
    failed = check(results, {kernel: read_baseline(kernel) for kernel in kernels()})
    if options.all and (left := stale(chosen)):
        print("\n".join(f"{row}: in {BASELINE}, but there is no such variant" for row in left))
        failed += len(left)
    print(f"{len(chosen)} variants compiled, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
