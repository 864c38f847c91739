"""JSON lines: one object per line. A row's bytes are written as they were read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gpuscore.commands.bulk.rows import Problem
from gpuscore.types.arrays import Float64Array

MAX_LINE = 64 * 2**20  # bytes of one line; a file without line ends must not fill the memory
BLOCK_ROWS, BLOCK_BYTES = 4096, 4 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class JsonBlock:
    """Lines of a file.

    Attributes:
        first: number of the first row in the file, from 1.
        raw: the lines, without white space around them.
        places: their line numbers, from 1.
    """

    path: Path
    first: int
    raw: list[bytes] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    _decoded: list[dict[str, Any] | Problem] | None = None

    @property
    def count(self) -> int:
        return len(self.raw)

    def decoded(self) -> list[dict[str, Any] | Problem]:
        """Return every line as an object, or the reason why it is none."""
        if self._decoded is None:
            self._decoded = [_decode(line) for line in self.raw]
        return self._decoded

    def texts(self, columns: Sequence[str]) -> list[tuple[str, ...] | Problem]:
        return [_texts(row, columns) for row in self.decoded()]

    def lines(self, keep: Sequence[int], scores: Float64Array, name: str) -> list[bytes]:
        found, added = [], msgspec.json.encode(name)
        for index, values in zip(keep, scores.tolist(), strict=True):
            head = self.raw[index][:-1].rstrip()
            found.append(b"%b,%b:%b}" % (head, added, msgspec.json.encode(values)))
        return found

    def table(self, keep: Sequence[int], schema: Any) -> Any:
        from gpuscore.commands.bulk.parquet import table_of

        rows = self.decoded()
        return table_of([rows[index] for index in keep], schema)

    def about(self, index: int) -> dict[str, Any]:
        place = {"file": self.path.name, "row": self.first + index, "line": self.places[index]}
        if isinstance(self.decoded()[index], dict):
            return {**place, "input": msgspec.Raw(self.raw[index])}
        return {**place, "input": self.raw[index].decode("utf-8", errors="backslashreplace")}


def read_json_lines(path: Path) -> Iterator[JsonBlock]:
    """Yield a file's rows; lines of white space only are no rows."""
    block, size, rows = JsonBlock(path, 1), 0, 0
    for place, line in _numbered(path):
        if not line:
            continue
        block.raw.append(line)
        block.places.append(place)
        rows, size = rows + 1, size + len(line)
        if block.count == BLOCK_ROWS or size > BLOCK_BYTES:
            yield block
            block, size = JsonBlock(path, rows + 1), 0
    if block.raw:
        yield block


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers; of one that is too long, MAX_LINE + 1 bytes."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
                pass
            yield number, (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()


def _decode(line: bytes) -> dict[str, Any] | Problem:
    if len(line) > MAX_LINE:
        return Problem(f"the line has over {MAX_LINE} bytes")
    try:
        found = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        return Problem(f"the line is not UTF-8: {error.reason}")
    except (msgspec.DecodeError, RecursionError) as error:
        return Problem(f"the line is not JSON: {error}")
    if not isinstance(found, dict):
        return Problem(f"the line is {_kind(found)}, not an object")
    return found


def _texts(row: dict[str, Any] | Problem, columns: Sequence[str]) -> tuple[str, ...] | Problem:
    if isinstance(row, Problem):
        return row
    for name in columns:
        if name not in row:
            return Problem(f"there is no field {name}")
        if not isinstance(row[name], str):
            return Problem(f"{name} is {_kind(row[name])}, not text")
    return tuple(row[name] for name in columns)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "text", list: "an array", dict: "an object"}
    return names[type(value)]
