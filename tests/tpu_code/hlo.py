"""Reads XLA's optimised HLO: computations, instructions and layouts."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|true_computation|false_computation)=%([^,\s]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONFIG = "backend_config="


@dataclass(frozen=True, slots=True)
class Shape:
    """An array with its layout."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]  # dimensions, the one that changes fastest first
    tile: tuple[int, ...]  # its first tile; arrays are padded to whole ones

    @property
    def itemsize(self) -> float:
        return BYTES[self.dtype] if self.dtype in BYTES else int(re.sub(r"\D", "", self.dtype)) / 8

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return int(math.prod(self.dims) * self.itemsize)

    @property
    def padded(self) -> int:
        """Bytes with the padding of tiles."""
        sizes = [self.dims[dim] for dim in reversed(self.order)] or [1]
        for place, size in enumerate(reversed(self.tile[-len(sizes) :]), 1):
            sizes[-place] = -(-sizes[-place] // size) * size
        return int(math.prod(sizes) * self.itemsize)


@dataclass(frozen=True)
class Instruction:
    name: str
    shapes: tuple[Shape, ...]  # of its results
    opcode: str
    operands: tuple[str, ...]  # names
    attributes: str  # the rest of the line
    root: bool

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    @cached_property
    def called(self) -> dict[str, str]:
        """Computations by role: calls, body, condition, branch 0, ..."""
        named = dict(_CALLED.findall(self.attributes))
        if branches := _BRANCHES.search(self.attributes):
            names = branches[1].replace("%", "").split(", ")
            return named | {f"branch {index}": name for index, name in enumerate(names)}
        if "true_computation" in named:  # of a condition that is a boolean
            names = [named.pop("false_computation"), named.pop("true_computation")]
            named |= {f"branch {index}": name for index, name in enumerate(names)}
        return named

    @cached_property
    def config(self) -> Mapping[str, Any]:
        start = self.attributes.find(_CONFIG)
        if start < 0:
            return {}
        config, _ = json.JSONDecoder().raw_decode(self.attributes[start + len(_CONFIG) :])
        return config if isinstance(config, dict) else {}

    @property
    def cycles(self) -> int:
        """XLA's estimate of the instruction's cycles; 0 if XLA has none."""
        return int(self.config.get("window_config", {}).get("estimated_cycles", 0))

    @property
    def vector_memory(self) -> int:
        """Bytes of VMEM that it takes while it runs, beside its operands and results there."""
        used = self.config.get("used_scoped_memory_configs", ())
        return sum(int(memory["size"]) for memory in used if memory["memory_space"] == "1")

    def attribute(self, name: str) -> str | None:
        match = re.search(rf"{name}=(\"[^\"]*\"|\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return None if match is None else match[1].strip('"')


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.root)

    @property
    def parameters(self) -> list[Instruction]:
        """The computation's parameters, in the order of their numbers."""
        parameters = [
            instruction
            for instruction in self.instructions.values()
            if instruction.opcode == "parameter"
        ]
        return sorted(parameters, key=lambda parameter: int(parameter.operands[0]))


class Program:
    """A compiled program.

    Args:
        text: `Compiled.as_text()`.
    """

    def __init__(self, text: str) -> None:
        self.head, _, _ = text.partition("\n")
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self._read(text.splitlines())

    def of(self, name: str) -> Computation:
        return self.computations[name]

    def within(self, name: str) -> Iterator[Instruction]:
        """Yield the instructions that a computation runs, in loops and branches too.

        Those inside of fusions, and of a loop's condition, are not among them.
        """
        for instruction in self.of(name).instructions.values():
            yield instruction
            for role, called in instruction.called.items():
                if role == "body" or role.startswith("branch") or instruction.opcode == "call":
                    yield from self.within(called)

    def inside(self, fusion: Instruction) -> Iterator[Instruction]:
        """Yield the instructions of a fusion and of the fusions in it."""
        if fusion.opcode == "fusion":
            for part in self.of(fusion.called["calls"]).instructions.values():
                yield part
                yield from self.inside(part)

    def aliased(self) -> dict[int, int]:
        """Return parameters whose memory an output takes: number of the output -> parameter."""
        match = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", self.head)
        pairs = re.findall(r"\{(\d*)\}: \((\d+),", match[1]) if match else []
        return {int(output or 0): int(parameter) for output, parameter in pairs}

    def _read(self, lines: list[str]) -> None:
        current: Computation | None = None
        for line in lines:
            if line.startswith(("%", "ENTRY")):
                header = _HEADER.match(line)
                assert header is not None, line
                current = Computation(header[2])
                self.computations[header[2]] = current
                self.entry = header[2] if header[1] else self.entry
            elif line == "}":
                current = None
            elif current is not None and " = " in line:
                instruction = _instruction(line)
                current.instructions[instruction.name] = instruction


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    root = left.startswith("ROOT ")
    shapes, right = _cut(right) if right.startswith("(") else right.split(" ", 1)
    opcode, _, right = right.strip().partition("(")
    inside, attributes = _cut("(" + right)
    names = re.findall(r"%([^\s,)]+)", inside) or re.findall(r"^\((\d+)\)", inside)
    name = left.removeprefix("ROOT ").removeprefix("%")
    arrays = tuple(_shape(*array) for array in _ARRAY.findall(shapes))
    return Instruction(name, arrays, opcode, tuple(names), attributes, root)


def _cut(text: str) -> tuple[str, str]:
    """Return what is in the first pair of parentheses, with them, and the rest."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :]
    raise ValueError(f"parentheses do not close: {text[:80]}")


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    order, _, rest = layout.partition(":")
    tile = re.search(r"T\(([\d,]+)\)", rest)
    sizes = tuple(int(size) for size in re.findall(r"\d+", dims))
    return Shape(
        dtype,
        sizes,
        tuple(int(dim) for dim in order.split(",") if dim) or tuple(reversed(range(len(sizes)))),
        tuple(int(size) for size in tile[1].split(",")) if tile else (),
    )
