"""The backlog: requests in flight, the limits on them, and the wait at the present rate."""

import math
from collections.abc import Callable

import numpy as np

from gpuscore.config import EngineConfig
from gpuscore.errors import Overloaded
from gpuscore.types.request import ScoreRequest

MAX_RETRY_AFTER = 30  # seconds
_SIZES = 48  # sizes are counted by their number of binary digits
# Places of a backlog's counts: requests, items and tokens, then requests and tokens per size.
_REQUESTS, _ITEMS, _TOKENS, _COUNT = range(4)
_SUM = _COUNT + _SIZES
PLACES = _SUM + _SIZES


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


RATE_SECONDS = 5.0  # of work, after which its weight in the average has fallen to 1/e


class Rate:
    """A smoothed rate in tokens per second; one thread adds, any thread may read `value`."""

    def __init__(self) -> None:
        self.value = 0.0  # unknown
        self._done = self._busy = 0.0

    def add(self, done: float, seconds: float) -> None:
        """Add `done` tokens computed in `seconds`."""
        kept = math.exp(-seconds / RATE_SECONDS)
        self._busy = kept * self._busy + seconds
        self._done = kept * self._done + done
        self.value = self._done / self._busy if self._busy > 0 else 0.0


class Backlog:
    """The requests that were admitted and are not answered yet.

    The owner calls `admit` and `leave` under its lock; any thread may read the rest at any time.

    Args:
        config: the limits on requests, items and tokens in flight.
        rate: returns the tokens computed per second; 0 while that is unknown.
        counts: of PLACES places, which several processes may share; then all their requests count
            together. None = of this process alone.
    """

    def __init__(
        self, config: EngineConfig, rate: Callable[[], float], counts: Counts | None = None
    ) -> None:
        self.config = config
        self._rate = rate
        self._counts = Counts.alone(PLACES) if counts is None else counts

    @property
    def most_requests(self) -> int:
        return self.config.max_queued_requests

    @property
    def requests(self) -> int:
        return self._counts.total(_REQUESTS)

    @property
    def items(self) -> int:
        return self._counts.total(_ITEMS)

    @property
    def tokens(self) -> int:
        return self._counts.total(_TOKENS)

    def admit(self, request: ScoreRequest) -> None:
        """Add a request to the backlog. An empty backlog admits any request, whatever its size.

        Raises:
            Overloaded: with this request, the backlog would exceed a limit.
        """
        tokens, items, config = request.num_tokens, len(request.item_ids), self.config
        if requests := self.requests:
            if requests >= config.max_queued_requests:
                raise self._full("")
            if self.tokens + tokens > config.max_queued_tokens:
                raise self._full(f", the limit is {config.max_queued_tokens} tokens")
            if self.items + items > config.max_queued_items:
                raise self._full(
                    f", with {self.items} items; the limit is {config.max_queued_items} items"
                )
        self._add(1, items, tokens)

    def leave(self, request: ScoreRequest) -> None:
        """Remove a request that was answered, failed or cancelled."""
        self._add(-1, -len(request.item_ids), -request.num_tokens)

    @property
    def retry_after(self) -> int:
        """Whole seconds until the backlog is computed, at the present rate; 1 without a rate."""
        rate = self._rate()
        return whole_seconds(self.tokens / rate) if rate > 0 else 1

    def seconds_ahead(self, tokens: int) -> float:
        """Seconds that a request of `tokens` tokens would wait for others; 0 without a rate.

        The scheduler gives all requests equal numbers of tokens. So before this request is done,
        each other request computes as many tokens as this one, or all of its own if it has fewer.
        Requests of one size are added up before they are compared, so this is an upper bound.
        """
        rate = self._rate()
        if rate <= 0:
            return 0.0
        counts = self._counts.totals(_COUNT, PLACES)
        shares = (min(s, n * tokens) for n, s in zip(counts[:_SIZES], counts[_SIZES:], strict=True))
        return sum(shares) / rate

    def wait_refusal(self, tokens: int, seconds: float) -> Overloaded | None:
        """Return an error if a request of `tokens` tokens would wait longer than `seconds`."""
        if self.tokens <= seconds * self._rate():  # short enough even if it waits for all of them
            return None
        wait = self.seconds_ahead(tokens)
        if wait <= seconds:
            return None
        return Overloaded(
            f"{self.requests} requests with {self.tokens} tokens are in flight, a wait of about "
            f"{wait:.0f} seconds; the limit is {seconds:.3g}",
            retry_after=whole_seconds(wait - seconds),
        )

    def _full(self, more: str) -> Overloaded:
        return Overloaded(
            f"{self.requests} requests with {self.tokens} tokens are in flight{more}",
            retry_after=self.retry_after,
        )

    def _add(self, sign: int, items: int, tokens: int) -> None:
        size = min(abs(tokens).bit_length(), _SIZES - 1)
        for place, number in (
            (_REQUESTS, sign),
            (_ITEMS, items),
            (_TOKENS, tokens),
            (_COUNT + size, sign),
            (_SUM + size, tokens),
        ):
            self._counts.add(place, number)


def whole_seconds(seconds: float) -> int:
    """Round to a value for the Retry-After header: 1 to MAX_RETRY_AFTER seconds."""
    return max(1, min(MAX_RETRY_AFTER, round(seconds)))
