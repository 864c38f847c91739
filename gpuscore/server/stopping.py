"""The signals that stop a server, and the lines that it prints then."""

import signal
from collections.abc import Callable
from time import monotonic

from gpuscore.config import ServerConfig

EVERY = 5.0  # seconds between two lines


class StopLines:
    """Says, at the signal and every few seconds, how many requests are still in flight.

    Args:
        say: prints a line; it must not block.
        clock: in seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._say, self._clock = say, clock
        self._next = float("-inf")

    def waiting(self, requests: int, left: float) -> None:
        """Note that the server drains, with so many requests in flight and seconds left for them.

        Call it often; most calls print nothing.
        """
        if self._clock() < self._next:
            return
        first, self._next = self._next < 0, self._clock() + EVERY
        if requests:
            some = "1 request" if requests == 1 else f"{requests:,} requests"
            self._say(
                f"gpuscore: stopping; waiting for {some} in flight, for at most {left:.0f} s; "
                "a second Ctrl-C or SIGTERM stops at once"
            )
        elif first:
            self._say("gpuscore: stopping; no request is in flight")

    def stopped(self, unanswered: bool) -> None:
        """Note the end."""
        ended = ", with requests in flight that got 503" if unanswered else ""
        self._say(f"gpuscore: stopped{ended}")


def stop_signals(config: ServerConfig) -> list[signal.Signals]:
    """Return the signals that drain the server.

    SIGHUP is not among them with a key file, which it reads again (`KeyReader`), nor under nohup,
    which ignores it.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    hangup = [] if config.api_key_file is not None or ignored else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]
