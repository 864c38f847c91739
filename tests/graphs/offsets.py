"""Offsets into large tensors: which of a kernel's pointer sums could leave 32 bits.

Triton computes in int32 unless a kernel widens a number, and a product that leaves 32 bits wraps
without an error. This reads a kernel's Triton IR: from every sum of a pointer into a large tensor
and an offset, back through the offset's arithmetic. A number that is loaded or carried through a
loop may have any size; what is made of constants, ranges, program ids, loop variables, arguments
and counted comparisons has a known one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LIMIT = 2**31
_RESULT = re.compile(r"^\s*(%\S+?)(?::\d+)? = (\S+) (.*)$")
_VALUE = re.compile(r"%[\w$.-]+")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")
_VARIABLE = re.compile(r"scf\.for (%\S+) = %\S+ to (%\S+) step ")
_FLAGS = re.compile(r"tensor<(\d+)xi1> to ")
_NUMBER = re.compile(r"(-?\d+)(?=[ >]|$)")
_MOVES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.trunci")
_WIDENS = ("arith.extsi", "arith.extui")
_SIZELESS = ("tt.load", "carried", "scf.for", "scf.if")


@dataclass(eq=False, slots=True)
class Operation:
    """One operation; `operands` are those whose results it uses."""

    name: str
    text: str  # attributes, then " : " and types
    operands: list["Operation"] = field(default_factory=list)

    @property
    def is_wide(self) -> bool:
        """True if its result is int64."""
        result = self.text.rpartition(" : ")[2].rpartition(" to ")[2]
        return re.search(r"(x|\b)i64\b", result) is not None


class _Reader:
    """Reads a kernel's IR; two regions beside each other may use one name."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Operation]] = [{}]
        self.owners: list[Operation | None] = [None]  # of each scope
        self.sums: list[Operation] = []  # of pointers and offsets

    def read(self, ttir: str) -> None:
        for line in ttir.splitlines():
            text = re.sub(r" loc\(.*$", "", line).rstrip()
            if text.lstrip().startswith("}"):
                self.scopes.pop()
                self.owners.pop()
            made = self._operation(text)
            if "scf.yield" in text and self.owners[-1] is not None:
                self.owners[-1].operands += self._operands(text)
            if text.endswith("{"):
                pairs = _PAIR.findall(text) if "scf.for" in text else ()
                inner = {name: Operation("carried", text, self._operands(x)) for name, x in pairs}
                if variable := _VARIABLE.search(text):
                    end = self._operands(variable[2])
                    inner[variable[1]] = Operation("variable", text, end)
                self.scopes.append(inner)
                self.owners.append(made)

    def _operation(self, text: str) -> Operation | None:
        match = _RESULT.match(text)
        if match is None:
            return None
        name, _, inside = match[2].partition("(")  # "tt.reduce"(%x) has its operands there
        operands = self._operands(inside) + self._operands(
            match[3].rpartition(" : ")[0] or match[3]
        )
        made = Operation(name.strip('"'), match[3], operands)
        self.scopes[-1][match[1]] = made
        if made.name == "tt.addptr":
            self.sums.append(made)
        return made

    def _operands(self, text: str) -> list[Operation]:
        return [self._value(name) for name in _VALUE.findall(text)]

    def _value(self, name: str) -> Operation:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        argument = Operation("argument", name)
        self.scopes[0][name] = argument
        return argument


def narrow_offsets(
    ttir: str, elements: Mapping[str, int], integers: Mapping[str, int]
) -> list[str]:
    """Name the offsets into large tensors that could leave 32 bits.

    Args:
        ttir: a kernel's Triton IR.
        elements: the most elements, from first to last, that tensors had, by the argument's name.
        integers: the largest values of integer arguments, and the sizes of the grid.
    """
    reader = _Reader()
    reader.read(ttir)
    large = {f"%{name}" for name, count in elements.items() if count > LIMIT}
    narrow = []
    for sum_ in reader.sums:
        pointer, offset = sum_.operands
        roots = sorted(large.intersection(_roots(pointer, set())))
        reason = next(_unsafe(offset, integers, wide=False), None) if roots else None
        if reason is not None:
            narrow.append(f"{', '.join(roots)}: {reason}")
    return list(dict.fromkeys(narrow))


def _roots(pointer: Operation, seen: set[Operation]) -> Iterator[str]:
    """Yield the arguments that a pointer comes from."""
    if pointer in seen:
        return
    seen.add(pointer)
    if pointer.name == "argument":
        yield pointer.text
    for operand in pointer.operands[:1] if pointer.name == "tt.addptr" else pointer.operands:
        yield from _roots(operand, seen)


def _unsafe(value: Operation, known: Mapping[str, int], wide: bool) -> Iterator[str]:
    """Yield the 32-bit arithmetic of an offset whose result may leave 32 bits.

    Args:
        value: the offset, or a part of it.
        known: sizes of arguments and of the grid.
        wide: the part is widened before it is used, so it may have any size of its type.
    """
    if value.name in _WIDENS:
        yield from _unsafe(value.operands[0], known, wide=True)
    elif value.name in _MOVES:
        yield from _unsafe(value.operands[0], known, wide)
    elif value.is_wide:
        for operand in value.operands if value.name not in _SIZELESS else ():
            yield from _unsafe(operand, known, wide=True)
    elif not (wide and value.name in (*_SIZELESS, "argument", "tt.get_program_id")):
        size = _size(value, known)
        if size is None or size >= LIMIT:
            yield f"{value.name} in int32 ({value.text.strip()})"


def _size(value: Operation, known: Mapping[str, int]) -> int | None:
    """Return the largest absolute value of an integer; None = any."""
    if value.name == "argument":
        return known.get(value.text.removeprefix("%"))
    if value.name == "tt.get_program_id":
        return known.get(f"grid.{value.text.strip()[0]}")
    if value.name == "arith.constant":
        number = _NUMBER.search(value.text)
        return abs(int(number[1])) if number else None
    if value.name == "tt.make_range":
        end = re.search(r"end = (\d+)", value.text)
        return int(end[1]) - 1 if end else None
    if value.name == "tt.reduce":
        return _most_flags(value.operands[0])
    if value.name in (*_MOVES, *_WIDENS, "variable"):
        return _size(value.operands[0], known)
    return _size_of_two(value, known)


def _most_flags(value: Operation) -> int | None:
    """Return the largest sum of comparisons, which are 0 or 1; None for other vectors."""
    match = _FLAGS.search(value.text) if value.name in _WIDENS else None
    return int(match[1]) if match else None


def _size_of_two(value: Operation, known: Mapping[str, int]) -> int | None:
    if value.name in _SIZELESS or len(value.operands) < 2:
        return None
    first, second = (_size(operand, known) for operand in value.operands[-2:])
    if value.name in ("arith.remsi", "arith.remui"):
        return second
    if first is None or second is None:
        return None
    if value.name == "arith.muli":
        return first * second
    if value.name in ("arith.addi", "arith.subi"):
        return first + second
    if value.name in ("arith.divsi", "arith.divui"):
        return first
    return max(first, second) if value.name == "arith.select" else None
