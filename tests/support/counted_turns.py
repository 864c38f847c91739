"""Turns for tests: they count the pieces and can give the work up."""

from contextlib import ExitStack
from typing import Self

from gpuscore.errors import DeadlineExceeded
from gpuscore.text.boundaries import announced_to


class Turned(ExitStack):
    """A block that records each piece of its work, and gives it up before piece number `last`."""

    def __init__(self, last: float = float("inf")) -> None:
        super().__init__()
        self.asked: list[int] = []  # characters of each piece
        self._last = last

    def __enter__(self) -> Self:
        self.enter_context(announced_to(self._hear))
        return super().__enter__()

    def _hear(self, characters: int) -> None:
        if len(self.asked) >= self._last:
            raise DeadlineExceeded("the request was given up")
        self.asked.append(characters)
