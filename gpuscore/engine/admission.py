"""The backlog: requests in flight, the wait that they cause, and the limits on them."""

from collections.abc import Callable

from gpuscore.config import EngineConfig
from gpuscore.engine.counts import Counts
from gpuscore.errors import Overloaded
from gpuscore.types.request import ScoreRequest

MAX_RETRY_AFTER = 30  # seconds
_SIZES = 48  # sizes are counted by their number of binary digits
# Places of a backlog's counts: requests, items and tokens, then requests and tokens per size.
_REQUESTS, _ITEMS, _TOKENS, _COUNT = range(4)
_SUM = _COUNT + _SIZES
PLACES = _SUM + _SIZES


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
