"""The backlog: requests in flight, the limits on them, and the wait at the present rate."""

import math
from collections.abc import Callable

from gpuscore.config import EngineConfig
from gpuscore.errors import Overloaded
from gpuscore.types.request import ScoreRequest

MAX_RETRY_AFTER = 30  # seconds
_SIZES = 48  # sizes are counted by their number of binary digits


class Backlog:
    """The requests that were admitted and are not answered yet.

    The event loop calls it, once its tokens are known: the engine itself refuses only what it has
    no memory for.

    Args:
        config: the limits on requests, items and tokens in flight.
        rate: returns the tokens computed per second; 0 while that is unknown.

    Attributes:
        requests, items, tokens: in flight.
    """

    def __init__(self, config: EngineConfig, rate: Callable[[], float]) -> None:
        self.config = config
        self.requests = self.items = self.tokens = 0
        self._rate = rate
        # Of requests of each size: their number, and their tokens.
        self._counts, self._sums = [0] * _SIZES, [0] * _SIZES

    @property
    def most_requests(self) -> int:
        return self.config.max_queued_requests

    def admit(self, request: ScoreRequest, seconds: float = math.inf) -> None:
        """Add a request to the backlog. An empty backlog admits any request, whatever its size.

        Raises:
            Overloaded: with this request, the backlog would exceed a limit, or the request would
                wait longer than `seconds`.
        """
        tokens, items, config = request.num_tokens, len(request.item_ids), self.config
        if (late := self.wait_refusal(tokens, seconds)) is not None:
            raise late
        if self.requests:
            if self.requests >= config.max_queued_requests:
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
        shares = (min(s, n * tokens) for n, s in zip(self._counts, self._sums, strict=True))
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
        self.requests += sign
        self.items += items
        self.tokens += tokens
        self._counts[size] += sign
        self._sums[size] += tokens


def whole_seconds(seconds: float) -> int:
    """Round to a value for the Retry-After header: 1 to MAX_RETRY_AFTER seconds."""
    return max(1, min(MAX_RETRY_AFTER, round(seconds)))
