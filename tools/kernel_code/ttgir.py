"""Loops of a kernel in Triton's GPU dialect, as it stands before it becomes PTX.

There a product, a copy and a wait are single operations, whose dependencies are explicit.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LOC = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_USED_LOC = re.compile(r"loc\((#loc\d*)\)$")
_FILE = re.compile(r'^"([^"]+)":(\d+):\d+$')
_CALL = re.compile(r"^callsite\((#loc\d*) at (#loc\d*)\)$")
_NAMED = re.compile(r'^"[^"]*"\((#loc\d*)\)$')
_VALUE = re.compile(r"%[\w]+")
_TILE = re.compile(r"tensor<(\d+(?:x\d+)+)x!tt\.ptr<[a-z]+(\d+)")
_CONTIGUITY = re.compile(r"contiguity = (\d+)")
_PENDING = re.compile(r"num = (\d+)")
COPY = "ttg.async_copy_global_to_local"
# Multiplies on tensor cores; without an mma encoding tt.dot becomes plain multiply-adds.
_PRODUCT = re.compile(r"ttng\.warp_group_dot |tt\.dot .*parent = #mma")


@dataclass(frozen=True, slots=True)
class IrLoop:
    """One loop; what `LoopFacts` says of its fields holds here. `products` counts operations."""

    header: str
    nesting: int
    products: int
    in_flight: int | None
    groups: int
    copy_bytes: int
    awaited_loads: int
    tile_loads: int


def read_ir_loops(text: str) -> list[IrLoop]:
    """Return a kernel's loops in the order of the text."""
    lines = text.splitlines()
    places = {match[1]: match[2] for line in lines if (match := _LOC.match(line))}
    spans = list(_spans(lines))
    seen: dict[str, int] = {}
    loops = []
    for start, end in spans:
        inside = [span for span in spans if start < span[0] and span[1] < end]
        body = [
            lines[i]
            for i in range(start + 1, end)
            if not any(first <= i <= last for first, last in inside)
        ]
        match = _USED_LOC.search(lines[end])
        header = _header(list(_frames(match[1], places))) if match else "?"
        seen[header] = seen.get(header, 0) + 1
        name = header if seen[header] == 1 else f"{header} #{seen[header]}"
        around = sum(first < start and end < last for first, last in spans)
        loops.append(_loop(name, around, body))
    return loops


def _spans(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First and last line of each loop; the last is the next brace at the same indentation."""
    for start, line in enumerate(lines):
        if " scf.for " in line or " scf.while " in line or line.lstrip().startswith("scf.for "):
            indent = line[: len(line) - len(line.lstrip())]
            yield (
                start,
                next(i for i in range(start + 1, len(lines)) if lines[i].startswith(indent + "}")),
            )


def _loop(name: str, nesting: int, body: Sequence[str]) -> IrLoop:
    waits = [line for line in body if "ttg.async_wait " in line]
    pending = [int(match[1]) for line in waits if (match := _PENDING.search(line))]
    copies = [line for line in body if COPY in line]
    loads = [line for line in body if " tt.load " in line]
    return IrLoop(
        header=name,
        nesting=nesting,
        products=sum(_PRODUCT.search(line) is not None for line in body),
        in_flight=min(pending, default=None),
        groups=sum("ttg.async_commit_group" in line for line in body),
        copy_bytes=min(filter(None, map(_copy_bytes, copies)), default=0),
        awaited_loads=len(_needed(copies, body) & {_result(line) for line in loads}),
        tile_loads=sum(_TILE.search(line) is not None for line in loads),
    )


def _copy_bytes(line: str) -> int:
    """Bytes that a thread copies at once; 0 unless a tile of two dimensions is copied."""
    tile = _TILE.search(line)
    if tile is None:
        return 0
    match = _CONTIGUITY.search(line)
    return int(tile[2]) // 8 * (int(match[1]) if match else 1)


def _result(line: str) -> str | None:
    """Name of an operation's result, without the number of results."""
    match = _VALUE.match(line.lstrip())
    return match[0] if match and " = " in line else None


def _needed(roots: Sequence[str], body: Sequence[str]) -> set[str | None]:
    """Values computed in `body` that `roots` depend on, within one iteration."""
    uses = {name: _values(line) for line in body if (name := _result(line))}
    needed: set[str | None] = set()
    left = [value for line in roots for value in _values(line)]
    while left:
        value = left.pop()
        if value in uses and value not in needed:
            needed.add(value)
            left.extend(uses[value])
    return needed


def _values(line: str) -> list[str]:
    """Operands of an operation."""
    _, equals, right = line.partition(" = ")
    return _VALUE.findall(right if equals and _result(line) else line)


def _frames(place: str, places: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield file and line of a location, then of the calls that it was inlined through."""
    text = places.get(place, "")
    if file := _FILE.match(text):
        yield file[1], int(file[2])
    elif file := _NAMED.match(text):
        yield from _frames(file[1], places)
    elif file := _CALL.match(text):
        yield from _frames(file[1], places)
        yield from _frames(file[2], places)


def _header(frames: Sequence[tuple[str, int]]) -> str:
    """Source of the innermost loop around a location: in its function, else in its callers.

    A pipelined loop has the location of some operation in it.
    """
    for path, line in frames:
        around = [span for span in _source_loops(path) if span[0] <= line <= span[1]]
        if around:
            return max(around)[2]
    return "?"


@cache
def _source_loops(path: str) -> list[tuple[int, int, str]]:
    """First line, last line and header of all loops of a Python file."""
    source = Path(path).read_text(encoding="utf-8")
    return [
        (
            node.lineno,
            node.end_lineno or node.lineno,
            f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}",
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.For)
    ]
