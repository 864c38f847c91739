"""Operations, bytes and XLA's estimated cycles of the instructions of each loop of a program."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tpu_code.chips import Chip
from tpu_code.hlo import Computation, Frames, Instruction, Program, Shape, Where

KERNEL = "tpu_custom_call"
# Instructions that take no time of their own.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
FREE |= {
    "call",
    "after-all",
    "partition-id",
    "copy-done",
    "slice-done",
    "opt-barrier",
    "async-done",
}
FREE |= {"async-start", "async-update", "copy-start", "slice-start"}  # see `_transfer`
TRANSFERS = {"copy-start", "slice-start", "async-start"}
COSTLY = 5  # instructions of each place that are named
EMULATED = 6  # passes of bfloat16 in a product of float32


@dataclass(frozen=True, slots=True)
class Place:
    """Instructions that run together: of a loop's body, a branch, or the program itself."""

    where: Where  # without frames: the program itself
    branch: int | None
    constant: int | None  # trips that are constant in the code
    cycles: int  # XLA's estimate, without kernels
    seconds: float  # least time of all its instructions, without kernels
    product_seconds: float  # the part of it that products take at the peak rate
    memory_seconds: float  # the same of HBM
    costly: tuple[tuple[str, int], ...]  # the instructions with the most cycles, and those


@dataclass(frozen=True, slots=True)
class Cost:
    """One instruction."""

    operations: float  # of bfloat16
    integer_operations: float  # of int8
    bytes: float  # from and to HBM

    def products(self, chip: Chip) -> float:
        return self.operations / chip.bf16 + self.integer_operations / chip.int8

    def memory(self, chip: Chip) -> float:
        return self.bytes / chip.bandwidth


def places(program: Program, chip: Chip) -> Iterator[Place]:
    """Yield the work of a program's own instructions, then of its loops and branches."""
    yield from _Reader(program, chip).places(program.entry, Where(), None, None)


class _Reader:
    def __init__(self, program: Program, chip: Chip) -> None:
        self.program, self.chip = program, chip

    def places(
        self, name: str, where: Where, branch: int | None, constant: int | None
    ) -> Iterator[Place]:
        computation = self.program.of(name)
        cycles, seconds, products, memory = 0, 0.0, 0.0, 0.0
        each: list[tuple[str, int]] = []
        for one in computation.instructions.values():
            cost = self.cost(computation, one)
            products += cost.products(self.chip)
            memory += cost.memory(self.chip)
            least = max(cost.products(self.chip), cost.memory(self.chip))
            seconds += least
            took = one.cycles if one.cycles is not None else round(least * self.chip.clock)
            cycles += took
            each.append((_described(one), took))
        costly = tuple(sorted(each, key=lambda pair: -pair[1])[:COSTLY])
        yield Place(where, branch, constant, cycles, seconds, products, memory, costly)
        turns: Counter[tuple[str, Frames]] = Counter()
        for one in computation.instructions.values():
            if one.opcode == "call":
                yield from self.places(one.called["to_apply"], where, branch, constant)
            if one.opcode not in ("while", "conditional"):
                continue
            frames = self.program.frames(one)
            turn = turns[one.opcode, frames]
            turns[one.opcode, frames] += 1
            there = Where(frames, (*where.turns, turn) if turn else where.turns)
            for role, called in one.called.items():
                if role == "body":
                    yield from self.places(called, there, None, self._constant_trips(one))
                elif role.startswith("branch"):
                    index = int(role.removeprefix("branch "))
                    yield from self.places(called, there, index, None)

    def _constant_trips(self, loop: Instruction) -> int | None:
        """Return the bound of a loop that compares its counter, from 0, with a constant."""
        instructions = self.program.of(loop.called["condition"]).instructions
        root = self.program.of(loop.called["condition"]).root
        if root.opcode != "compare" or root.attribute("direction") != "LT":
            return None
        bounds = [instructions[name] for name in root.operands if name in instructions]
        values = [one.operands[0] for one in bounds if one.opcode == "constant" and one.operands]
        return int(values[0]) if len(values) == 1 and values[0].isdigit() else None

    def cost(self, computation: Computation, one: Instruction) -> Cost:
        if one.opcode in TRANSFERS:
            return Cost(0, 0, self._transfer(one))
        if one.opcode in FREE or one.attribute("custom_call_target") == KERNEL:
            return Cost(0, 0, 0)
        floats, integers = self._operations(computation, one)
        return Cost(floats, integers, self._bytes(computation, one))

    def _transfer(self, one: Instruction) -> int:
        """Return the bytes of a copy between HBM and VMEM; its results are source, copy, signal."""
        arrays = [shape for shape in one.shapes if shape.space <= 1 and shape.elements > 1]
        return min((shape.padded for shape in arrays), default=0)

    def _operations(self, computation: Computation, one: Instruction) -> tuple[float, float]:
        if one.opcode == "fusion":
            inner = self.program.of(one.called["calls"])
            found = [self._operations(inner, part) for part in inner.instructions.values()]
            return sum(part[0] for part in found), sum(part[1] for part in found)
        if one.opcode not in ("convolution", "dot"):
            return 0, 0
        left, right = (computation.instructions[name].shape for name in one.operands)
        count = 2 * one.shape.elements * _summed(one, left)
        if "f32" in (left.dtype, right.dtype):
            return count * (EMULATED if "highest" in one.attributes else 1), 0
        return (0, count) if "s8" in (left.dtype, right.dtype) else (count, 0)

    def _bytes(self, computation: Computation, one: Instruction) -> float:
        """Return what an instruction reads from and writes to HBM."""
        shapes = [computation.instructions[name].shapes for name in one.operands]
        if one.opcode == "fusion":
            inside = _Inside(self.program, self.program.of(one.called["calls"]))
            read = sum(
                _in_hbm(shape[0], inside.read(place)) for place, shape in enumerate(shapes) if shape
            )
            return read + sum(
                _in_hbm(shape, inside.written(place)) for place, shape in enumerate(one.shapes)
            )
        if one.opcode in ("dynamic-slice", "gather", "slice"):
            moved = one.shape.padded
            return _in_hbm(shapes[0][0], moved) + _in_hbm(one.shape, moved)
        if one.opcode in ("dynamic-update-slice", "scatter"):
            moved = shapes[1 if one.opcode == "dynamic-update-slice" else -1][0].padded
            return 2 * _in_hbm(one.shape, moved)
        if one.opcode == "custom-call":
            return sum(_in_hbm(shape, shape.padded) for shape in one.shapes)
        every = [*one.shapes, *(shape for found in shapes for shape in found)]
        return sum(_in_hbm(shape, shape.padded) for shape in every)


def _described(one: Instruction) -> str:
    """Return what an instruction is for and what it makes."""
    made = ", ".join(f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in one.shapes[:2])
    name = (one.attribute("op_name") or one.name).split("/")
    return f"{one.opcode} {'/'.join(name[-2:])} -> {made}"


def _in_hbm(shape: Shape, moved: float) -> float:
    return 0 if shape.space else moved


def _summed(one: Instruction, left: Shape) -> int:
    """Return the number of products that are summed into each element of the result."""
    labels = one.attribute("dim_labels")
    if labels is not None:
        # XLA writes batches of products as windows that reach one element each.
        return left.dims[labels.split("_")[0].index("f")]
    over = one.attribute("lhs_contracting_dims") or "{}"
    return math.prod(left.dims[int(dim)] for dim in over.strip("{}").split(",") if dim)


class _Inside:
    """The parts of its operands and results that a fusion touches."""

    def __init__(self, program: Program, computation: Computation) -> None:
        self.program, self.computation = program, computation

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for one in self.computation.instructions.values():
            for name in one.operands:
                found.setdefault(name, []).append(one)
        return found

    def read(self, place: int) -> float:
        """Bytes that are read of an operand: slices of it, where nothing else uses it."""
        parameter = self.computation.parameters[place]
        total = 0.0
        for user in self.users.get(parameter.name, ()):
            total += self._read_by(user, parameter)
        return min(total, parameter.shape.padded)

    def _read_by(self, user: Instruction, operand: Instruction) -> float:
        first = user.operands[0] == operand.name
        if user.opcode in ("dynamic-slice", "slice", "gather") and first:
            return user.shape.padded
        if user.opcode in ("dynamic-update-slice", "scatter") and first:
            return 0  # updated in place
        if user.opcode == "bitcast":
            return sum(self._read_by(one, user) for one in self.users.get(user.name, ()))
        if user.opcode == "fusion":
            inner = _Inside(self.program, self.program.of(user.called["calls"]))
            places = [at for at, name in enumerate(user.operands) if name == operand.name]
            return max(inner.read(at) for at in places)
        return operand.shape.padded

    def written(self, place: int) -> float:
        """Bytes that are written of a result: updates, where it is updated in place."""
        root = self.computation.root
        if root.opcode == "tuple":
            root = self.computation.instructions[root.operands[place]]
        return self._written_by(root)

    def _written_by(self, one: Instruction) -> float:
        instructions = self.computation.instructions
        if one.opcode == "dynamic-update-slice":
            return instructions[one.operands[1]].shape.padded
        if one.opcode == "scatter":  # reads what it replaces a part of
            return 2 * instructions[one.operands[-1]].shape.padded
        if one.opcode == "bitcast" and one.operands[0] in instructions:
            return self._written_by(instructions[one.operands[0]])
        if one.opcode == "fusion":
            return _Inside(self.program, self.program.of(one.called["calls"])).written(0)
        return one.shape.padded
