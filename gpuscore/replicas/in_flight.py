"""The work that a replica has, as the server can know it."""

from dataclasses import dataclass


@dataclass(slots=True)
class InFlight:
    """Tokens sent to a replica and not answered, less what it reports to have computed of them.

    The engine gives its requests equal shares, so many of them end at the same time: their tokens
    alone would not tell whether a replica has just begun or is nearly done.
    """

    tokens: int = 0  # of all parts in flight
    _reports: int = 0  # seen so far
    _since: int = 0  # tokens sent since the last one

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self._since += tokens

    def remove(self, tokens: int) -> None:
        self.tokens -= tokens

    def left(self, reported: tuple[int, int]) -> int:
        """Return the tokens that are probably left to compute.

        Args:
            reported: the number of reports so far, and the tokens left at the last one.
        """
        reports, left = reported
        if reports != self._reports:
            self._reports, self._since = reports, 0
        return min(self.tokens, left + self._since)
