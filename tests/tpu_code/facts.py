"""`Facts` of a compiled program, in numbers and names; kept by what was lowered.

A program takes up to a minute to compile. Facts depend on the lowered program, XLA's options and
versions, and the modules here that read it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from tpu_code.cases import EXTEND, Case, compiler_options, traced
from tpu_code.hlo import Instruction, Program
from tpu_code.kernel_memory import KernelMemory, declared

READERS = ("chips.py", "facts.py", "hlo.py", "kernel_memory.py")
KERNEL = "tpu_custom_call"
PAGES = "pool.pages"
# Instructions that are counted in a layer; all others too, together. Those of the second line are
# also counted inside of fusions.
COUNTED = ("fusion", "while", "copy")
MOVING = ("dynamic-slice", "dynamic-update-slice", "scatter", "gather")
# Instructions that are not counted, because they take no time of their own.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
FREE |= {"call", "after-all", "partition-id", "opt-barrier", "copy-start", "copy-done"}
FREE |= {"slice-start", "slice-done", "async-start", "async-update", "async-done"}
# Instructions that have an array's shape, but no new memory for it.
SAME_MEMORY = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional", "call"}
SAME_MEMORY |= {"opt-barrier", "dynamic-update-slice", "scatter", "copy-done"}


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of the program."""

    name: str  # such as pool.k
    bytes: int  # of its elements
    padded: int  # with the padding of tiles
    aliased: bool  # an output takes its memory

    @property
    def part(self) -> str:
        """The argument that it belongs to: weights, pool, tables, ..."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A Pallas call: bytes that it declares, and that the compiler took of VMEM."""

    declared: KernelMemory
    taken: int


@dataclass(frozen=True, slots=True)
class Facts:
    arguments: tuple[Argument, ...]
    argument_bytes: int  # as XLA counts them
    temporary: int  # bytes
    results: int  # bytes of outputs that take no argument's memory
    aliased: int  # bytes of those that do
    layer: Mapping[str, int]  # instructions of a layer by opcode, of the loop over layers
    outside: Mapping[str, int]  # the same, of everything else
    # Instructions that make an array as large as a layer of the pages.
    copies: tuple[str, ...]
    kernels: tuple[CompiledKernel, ...]
    cycles: int  # XLA's estimate of all code, each instruction run once, without kernels

    @property
    def batch_bytes(self) -> int:
        """Memory that running the program takes beside its arguments."""
        return self.temporary + self.results

    def part(self, name: str) -> list[Argument]:
        return [argument for argument in self.arguments if argument.part == name]


def facts_of(case: Case, cache: Path | None) -> Facts:
    """Return the facts of a program, from `cache` if it has them.

    Raises:
        RuntimeError: XLA refuses the program.
    """
    program = traced(case)
    lowered = program.lower()
    if cache is None:
        return compiled_facts(case, program, lowered)
    path = cache / versions() / f"{fingerprint(case, lowered)}.json"
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=Facts)
    facts = compiled_facts(case, program, lowered)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Moved into place when complete, because several processes may write.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.encode(facts))
    part.replace(path)
    return facts


def measure(case: Case, cache: Path | None) -> Facts | str:
    """Return the facts of a program, or why there are none."""
    try:
        return facts_of(case, cache)
    except Exception as error:  # noqa: BLE001  XLA's errors have no common base
        return f"not compiled: {type(error).__name__}: {str(error)[:2000]}"


def versions() -> str:
    return f"jaxlib-{metadata.version('jaxlib')}-libtpu-{metadata.version('libtpu')}"


def fingerprint(case: Case, lowered: Any) -> str:
    """Hash of a lowered program and of this reader."""
    reader = [Path(__file__).with_name(name).read_bytes() for name in READERS]
    parts = (case.chip, str(lowered.as_text()), sorted(compiler_options(case).items()))
    return hashlib.sha256(repr(parts).encode() + b"".join(reader)).hexdigest()


def compiled_facts(case: Case, traced_program: Any, lowered: Any) -> Facts:
    compiled = lowered.compile(compiler_options(case))
    memory, program = compiled.memory_analysis(), Program(compiled.as_text())
    arguments = tuple(_arguments(program))
    pool = [argument for argument in arguments if argument.part == "pool"]
    layers = traced_program.args_info[0][1][0].shape[0] if case.part == EXTEND else 1
    pages = min((a.bytes for a in pool if a.name == PAGES), default=0)
    loop = _layer_loop(program, pool)
    body = [] if loop is None else list(program.within(loop.called["body"]))
    every = list(program.within(program.entry))
    return Facts(
        arguments=arguments,
        argument_bytes=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        layer=_counts(program, body),
        outside=_counts(program, every, without=body),
        copies=tuple(_copies(program, every, pages // layers)),
        kernels=tuple(_kernels(every, declared(traced_program.jaxpr))),
        cycles=sum(instruction.cycles for instruction in every),
    )


def _arguments(program: Program) -> Iterator[Argument]:
    aliased = set(program.aliased().values())
    for number, parameter in enumerate(program.of(program.entry).parameters):
        name = parameter.attribute("op_name") or parameter.name
        yield Argument(name, parameter.shape.bytes, parameter.shape.padded, number in aliased)


def _layer_loop(program: Program, pool: list[Argument]) -> Instruction | None:
    """Return the loop over layers: the loop with the most code that holds the pool."""
    if not pool:
        return None
    sizes = {argument.bytes for argument in pool}
    loops = [
        instruction
        for instruction in program.of(program.entry).instructions.values()
        if instruction.opcode == "while" and sizes & {shape.bytes for shape in instruction.shapes}
    ]
    return max(loops, key=lambda loop: len(list(program.within(loop.called["body"]))), default=None)


def _counts(
    program: Program, every: list[Instruction], without: list[Instruction] | None = None
) -> dict[str, int]:
    less = {id(instruction) for instruction in without or ()}
    chosen = [instruction for instruction in every if id(instruction) not in less]
    by_opcode = Counter(instruction.opcode for instruction in chosen)
    kernels = sum(instruction.attribute("custom_call_target") == KERNEL for instruction in chosen)
    named = {*COUNTED, *MOVING, *FREE}
    rest = sum(count for opcode, count in by_opcode.items() if opcode not in named) - kernels
    counted = {opcode: by_opcode[opcode] for opcode in COUNTED}
    inside = Counter(instruction.opcode for part in chosen for instruction in program.inside(part))
    moving = {opcode: by_opcode[opcode] + inside[opcode] for opcode in MOVING}
    return counted | moving | {"kernel": kernels, "other": rest}


def _copies(program: Program, every: list[Instruction], size: int) -> Iterator[str]:
    """Yield the instructions that make an array in memory of its own, of at least `size` bytes."""
    for instruction in every:
        if not size or instruction.opcode in SAME_MEMORY:
            continue
        if (
            instruction.opcode == "custom-call"
            and "aliasing" in instruction.attributes
            and _aliases(instruction)
        ):
            continue
        shapes = instruction.shapes
        large = [shape for shape in shapes if shape.bytes >= size]
        if large and not (instruction.opcode == "fusion" and _in_place(program, instruction)):
            dims = ", ".join(f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in large)
            yield f"{instruction.opcode} makes {dims}"


def _aliases(instruction: Instruction) -> bool:
    return "output_to_operand_aliasing" in instruction.attributes


def _in_place(program: Program, fusion: Instruction) -> bool:
    """Tell whether a fusion updates its operand."""
    computation = program.of(fusion.called["calls"])
    roots = [computation.root]
    if computation.root.opcode == "tuple":
        roots = [computation.instructions[name] for name in computation.root.operands]
    large = max(roots, key=lambda root: root.shape.bytes)
    while large.opcode == "bitcast":
        large = computation.instructions[large.operands[0]]
    return large.opcode in ("dynamic-update-slice", "scatter")


def _kernels(every: list[Instruction], declared: list[KernelMemory]) -> Iterator[CompiledKernel]:
    calls = [
        instruction
        for instruction in every
        if instruction.attribute("custom_call_target") == KERNEL
    ]
    for place, kernel in enumerate(declared):
        taken = calls[place].vector_memory if place < len(calls) else 0
        yield CompiledKernel(kernel, taken)
