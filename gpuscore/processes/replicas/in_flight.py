"""The work that a replica has, as the server can know it."""

from dataclasses import dataclass

from gpuscore.processes.worker.patience import Report


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

    def left(self, report: Report) -> int:
        """Return the tokens that are probably left to compute, by the engine's last report."""
        if report.number != self._reports:
            self._reports, self._since = report.number, 0
        left = report.tokens_left + self._since
        return min(self.tokens, left) if report.alone else left
