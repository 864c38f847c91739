"""Compile a variant without a GPU, and read the facts of its code.

Triton's wheel contains ptxas, cuobjdump and nvdisasm. Facts are kept in a folder under a hash of
everything they depend on, because a variant takes seconds to compile and to disassemble.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gpuscore_kernels.variant import Variant
from kernel_code.facts import MMA, WGMMA, CodeFacts, LoopFacts, count
from kernel_code.sass import (
    SassLoop,
    read_listing,
    read_loops,
)
from kernel_code.ttgir import IrLoop, read_ir_loops

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
MATRIX = (*WGMMA, *MMA)
READERS = ("compiled.py", "sass.py", "ttgir.py")  # files that decide what facts there are


def facts_of(variant: Variant, arch: int, cache: Path | None) -> CodeFacts:
    """Return the facts of a variant compiled for one architecture, from `cache` if it has them.

    Raises:
        ValueError: the variant names unknown arguments, or the code cannot be read. Triton raises
            errors of its own classes.
    """
    if cache is None:
        return compiled_facts(variant, arch)
    path = cache / triton_version() / f"{fingerprint(variant, arch)}.json"
    if path.is_file():
        return CodeFacts.from_json(json.loads(path.read_text(encoding="utf-8")))
    facts = compiled_facts(variant, arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Moved into place when complete, because several processes may write.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(facts.to_json()), encoding="utf-8")
    part.replace(path)
    return facts


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def fingerprint(variant: Variant, arch: int) -> str:
    """Hash of a variant's source (with all functions it calls), its options and this reader."""
    reader = [Path(__file__).with_name(name).read_bytes() for name in READERS]
    parts = (
        variant.kernel.cache_key,
        sorted(variant.signature.items()),
        sorted(variant.constexprs.items()),
        sorted(variant.divisible),
        variant.num_warps,
        variant.num_stages,
        arch,
    )
    return hashlib.sha256(repr(parts).encode() + b"".join(reader)).hexdigest()


def compiled_facts(variant: Variant, arch: int) -> CodeFacts:
    """Compile a variant and read its code."""
    compiled = compiled_variant(variant, arch)
    binary = _read_binary(compiled.asm["cubin"])
    return CodeFacts(
        triton=triton_version(),
        arch=arch,
        warps=int(compiled.metadata.num_warps),
        registers=binary.registers,
        stack=binary.stack,
        shared=int(compiled.metadata.shared),
        loops=tuple(joined(read_ir_loops(compiled.asm["ttgir"]), binary.loops)),
        rest=binary.rest,
    )


def compiled_variant(variant: Variant, arch: int) -> Any:
    """Return Triton's result for a variant, whose `asm` holds all stages of its code.

    Raises:
        ValueError: the variant names unknown arguments. Triton raises errors of its own classes.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import cache

    names = variant.kernel.arg_names
    unknown = set(variant.signature) | set(variant.constexprs) | set(variant.divisible)
    if unknown := unknown - set(names):
        raise ValueError(f"{variant.name} names unknown arguments: {', '.join(sorted(unknown))}")
    source = ASTSource(
        variant.kernel,
        {name: variant.signature.get(name, "constexpr") for name in names},
        dict(variant.constexprs),
        {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    # Triton's own cache may hold code with line numbers of another checkout. As nothing is read
    # from it, Triton need not hash its own files, 1.5 s of a core, to name what it writes there.
    with (
        knobs.compilation.scope(),
        mock.patch.object(cache, "triton_key", return_value=triton_version()),
    ):
        knobs.compilation.always_compile = True
        knobs.compilation.disable_line_info = False
        return triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
        )


@dataclass(frozen=True, slots=True)
class _Binary:
    registers: int
    stack: int
    loops: Sequence[SassLoop]
    rest: Mapping[str, int]


def _read_binary(cubin: bytes) -> _Binary:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = tool("cuobjdump", "-res-usage", str(path))
        # Without an analysis of data flow that nothing here reads, a quarter of its time.
        listing = tool("nvdisasm", "-c", "-ndf", str(path))
    match = _USAGE.search(usage)
    if match is None:
        raise ValueError(f"cuobjdump -res-usage names no registers: {usage}")
    code = read_listing(listing)
    loops, rest = read_loops(code)
    return _Binary(int(match[1]), int(match[2]), loops, rest)


def tool(name: str, *arguments: str) -> str:
    """Output of one of the programs in Triton's wheel."""
    from triton.backends import nvidia

    path = Path(nvidia.__path__[0]) / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def joined(ir: Sequence[IrLoop], sass: Sequence[SassLoop]) -> Iterator[LoopFacts]:
    """Yield each loop of the machine code with its facts in Triton's dialect.

    Loops with products correspond in their order, and so do the others, unless the assembler
    has unrolled or removed some, or has made loops of its own.

    Raises:
        ValueError: loops with products do not correspond, or the two disagree on a wait.
    """
    with_products = [loop for loop in ir if loop.products]
    plain = [loop for loop in ir if not loop.products]
    matrix = [loop for loop in sass if count(loop.opcodes, *MATRIX)]
    if len(matrix) != len(with_products):
        raise ValueError(f"{len(with_products)} loops with products became {len(matrix)}")
    left = with_products.copy()
    others = plain.copy() if len(plain) == len(sass) - len(matrix) else []
    for loop in sass:
        source = left if count(loop.opcodes, *MATRIX) else others
        yield _with_source(loop, source.pop(0) if source else None)


def _with_source(loop: SassLoop, ir: IrLoop | None) -> LoopFacts:
    if ir is None:
        return LoopFacts("?", loop.nesting, loop.in_flight, 0, 0, 0, 0, loop.opcodes)
    if ir.products and ir.in_flight != loop.in_flight:
        raise ValueError(
            f"{ir.header}: Triton waits until {ir.in_flight} groups of copies are under way, the "
            f"machine code until {loop.in_flight}"
        )
    return LoopFacts(
        header=ir.header,
        nesting=loop.nesting,
        in_flight=ir.in_flight,
        groups=ir.groups,
        copy_bytes=ir.copy_bytes,
        awaited_loads=ir.awaited_loads,
        tile_loads=ir.tile_loads,
        opcodes=loop.opcodes,
    )
