"""Whole numbers that limits are compared with: of one process, or of several that share them."""

import numpy as np


class Counts:
    """Numbers by place, in a table with one row per process.

    A process writes its own row only, so no lock is needed between processes: numbers of eight
    bytes are written and read whole. Processes that compare with a limit at the same moment may all
    find room for one more, so a limit holds within one unit for each further process.

    Args:
        table: of C int64 numbers, row by row.
        width: places of a row.
        row: of this process.
        first: the place in the row that is place 0 here.
    """

    def __init__(self, table: memoryview, width: int, row: int = 0, first: int = 0) -> None:
        self._table, self._width, self._first = table, width, first
        self._own = row * width + first
        self._alone = len(table) == width

    @classmethod
    def alone(cls, width: int) -> "Counts":
        """Return counts that no other process shares."""
        return cls(memoryview(bytearray(8 * width)).cast("q"), width)

    def add(self, place: int, number: int) -> None:
        """Add to this process's number. Calls of several threads need a lock."""
        self._table[self._own + place] += number

    def total(self, place: int) -> int:
        """Return the sum over all processes."""
        if self._alone:
            return self._table[self._own + place]
        return sum(self._table[self._first + place :: self._width])

    def totals(self, start: int, stop: int) -> list[int]:
        """Return the sums over all processes of the places from `start` to `stop` - 1."""
        if self._alone:
            return self._table[self._own + start : self._own + stop].tolist()
        rows = np.frombuffer(self._table, np.int64).reshape(-1, self._width)
        sums: list[int] = rows[:, self._first + start : self._first + stop].sum(axis=0).tolist()
        return sums
