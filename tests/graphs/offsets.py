"""Offsets into large tensors: which of a kernel's pointer sums could leave 32 bits.

Triton computes in int32 unless a kernel widens a number, and a product that leaves 32 bits wraps
without an error. This reads a kernel's Triton IR: from every sum of a pointer into a large tensor
and an offset, back through the offset's arithmetic. A number that is loaded, a program's id or a
loop's variable may have any size; what is made of constants, ranges and arguments has a known one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LIMIT = 2**31
_RESULT = re.compile(r"^\s*(%\S+?)(?::\d+)? = (\S+) (.*)$")
_VALUE = re.compile(r"%[\w$.#-]+")
_LOOP = re.compile(r"scf\.for %(\S+) = .* iter_args\((.*?)\) ->")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")
_MOVES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.trunci")
_WIDENS = ("arith.extsi", "arith.extui")


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    operands: tuple[str, ...]
    text: str  # attributes and types

    @property
    def is_wide(self) -> bool:
        """True if its result is int64."""
        return re.search(r"(x|\b)i64\b", self.text.rpartition(" : ")[2].rpartition(" to ")[2]) is not None


@dataclass(slots=True)
class Code:
    """A kernel's operations by the name of their result."""

    operations: dict[str, Operation] = field(default_factory=dict)
    sums: list[Operation] = field(default_factory=list)  # of pointers and offsets

    @staticmethod
    def of(ttir: str) -> "Code":
        code = Code()
        for line in ttir.splitlines():
            text = re.sub(r" loc\(.*$", "", line)
            if loop := _LOOP.search(text):
                for inner, outer in _PAIR.findall(loop[2]):
                    code.operations[inner] = Operation("carried", (outer,), text)
            if found := _RESULT.match(text):
                body, _, types = found[3].rpartition(" : ")
                operation = Operation(found[2], tuple(_VALUE.findall(body)), f"{body} : {types}")
                code.operations[found[1]] = operation
                if operation.name == "tt.addptr":
                    code.sums.append(operation)
        return code


def narrow_offsets(
    ttir: str, elements: Mapping[str, int], integers: Mapping[str, int]
) -> list[str]:
    """Name the offsets into large tensors that could leave 32 bits.

    Args:
        ttir: a kernel's Triton IR.
        elements: the most elements, from first to last, that tensors had, by the argument's name.
        integers: the largest values of integer arguments.
    """
    code = Code.of(ttir)
    large = {f"%{name}" for name, count in elements.items() if count > LIMIT}
    known = {f"%{name}": value for name, value in integers.items()}
    found = []
    for sum_ in code.sums:
        pointer, offset = sum_.operands[:2]
        if roots := large.intersection(_roots(code, pointer)):
            reason = next(_unsafe(code, offset, known, wide=False), None)
            if reason is not None:
                found.append(f"{', '.join(sorted(roots))}: {reason}")
    return list(dict.fromkeys(found))


def _roots(code: Code, name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the arguments that a pointer comes from."""
    base = name.partition("#")[0]
    if base in seen:
        return
    operation = code.operations.get(base)
    if operation is None:
        yield base
        return
    operands = operation.operands[:1] if operation.name == "tt.addptr" else operation.operands
    for operand in operands:
        yield from _roots(code, operand, seen | {base})


def _unsafe(code: Code, name: str, known: Mapping[str, int], wide: bool) -> Iterator[str]:
    """Yield the 32-bit arithmetic of an offset whose result may leave 32 bits.

    Args:
        wide: the value was widened since, so that it may have any size itself.
    """
    operation = code.operations.get(name.partition("#")[0])
    if operation is None or operation.name in ("tt.load", "tt.get_program_id", "carried"):
        if not wide and _bound(code, name, known) is None:
            yield f"{operation.name if operation else name} without int64"
        return
    if operation.name in _WIDENS:
        yield from _unsafe(code, operation.operands[0], known, wide=True)
        return
    if operation.name in _MOVES:
        yield from _unsafe(code, operation.operands[0], known, wide)
        return
    if operation.is_wide:
        for operand in operation.operands:
            yield from _unsafe(code, operand, known, wide=True)
        return
    bound = _bound(code, name, known)
    if bound is None or bound >= LIMIT:
        yield f"{operation.name} of {', '.join(operation.operands)} in int32"


def _bound(code: Code, name: str, known: Mapping[str, int]) -> int | None:
    """Return the largest size of an integer; None = any."""
    operation = code.operations.get(name.partition("#")[0])
    if operation is None:
        return known.get(name)
    if operation.name == "arith.constant":
        number = re.search(r"(-?\d+)(?=[ >]|$)", operation.text)
        return abs(int(number[1])) if number else None
    if operation.name == "tt.get_program_id":
        axis = operation.text.strip()[0]
        return known.get(f"%grid.{axis}")
    if operation.name == "arith.select":
        sizes = [_bound(code, operand, known) for operand in operation.operands[1:]]
        return None if None in sizes else max(size for size in sizes if size is not None)
    if operation.name == "tt.make_range":
        end = re.search(r"end = (\d+)", operation.text)
        return int(end[1]) - 1 if end else None
    if operation.name in (*_MOVES, *_WIDENS):
        return _bound(code, operation.operands[0], known)
    return _bound_of_two(code, operation, known)


def _bound_of_two(code: Code, operation: Operation, known: Mapping[str, int]) -> int | None:
    sizes = [_bound(code, operand, known) for operand in operation.operands]
    first, second = (*sizes, None, None)[:2]
    if operation.name in ("arith.remsi", "arith.remui"):
        return second
    if first is None or second is None:
        return None
    if operation.name == "arith.muli":
        return first * second
    if operation.name in ("arith.addi", "arith.subi"):
        return first + second
    if operation.name in ("arith.divsi", "arith.divui"):
        return first
    return None
