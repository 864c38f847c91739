"""Turns for tests: given up from the start, or never asked, or after so many pieces."""

from gpuscore.errors import DeadlineExceeded
from gpuscore.text.turns import Turns


class Turned(Turns):
    """Counts what is asked, and gives the work up before the piece number `last`."""

    def __init__(self, last: float = float("inf")) -> None:
        self.asked: list[int] = []  # characters
        self._last = last

    def before(self, characters: int) -> None:
        if len(self.asked) >= self._last:
            raise DeadlineExceeded("the request was given up")
        self.asked.append(characters)
