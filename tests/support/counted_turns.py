"""Turns for tests: they count the pieces and can give the work up."""

from gpuscore.errors import DeadlineExceeded
from gpuscore.text.boundaries import Turns


class Turned(Turns):
    """Turns that record each piece, and give the work up before the piece number `last`."""

    def __init__(self, last: float = float("inf")) -> None:
        self.asked: list[int] = []  # characters of each piece
        self._last = last

    def before(self, characters: int) -> None:
        if len(self.asked) >= self._last:
            raise DeadlineExceeded("the request was given up")
        self.asked.append(characters)
