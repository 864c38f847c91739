"""What is in flight, how long it takes, and what would be too much."""

from collections.abc import Callable

from gpuscore.config import EngineConfig
from gpuscore.errors import Overloaded
from gpuscore.request import ScoreRequest

MAX_RETRY_AFTER = 30  # seconds
_SIZES = 48  # sizes are counted by their number of binary digits


class Backlog:
    """Requests that were admitted and are not answered yet.

    `admit` and `leave` are called under their owner's lock; the rest may be read at any time.

    Args:
        config: how much may be in flight.
        rate: says how many tokens per second are computed; 0 as long as that is unknown.
    """

    def __init__(self, config: EngineConfig, rate: Callable[[], float]) -> None:
        self.config = config
        self.requests = self.items = self.tokens = 0
        self._rate = rate
        self._count, self._sum = [0] * _SIZES, [0] * _SIZES  # requests and their tokens, by size

    def admit(self, request: ScoreRequest) -> None:
        """Count a request in. One is always admitted, however large it is.

        Raises:
            Overloaded: there is too much in flight.
        """
        tokens, items, config = request.num_tokens, len(request.item_ids), self.config
        if self.requests:
            if self.requests >= config.max_queued_requests:
                raise self._full("")
            if self.tokens + tokens > config.max_queued_tokens:
                raise self._full(f", the limit is {config.max_queued_tokens} tokens")
            if self.items + items > config.max_queued_items:
                raise self._full(
                    f", {self.items} items of {config.max_queued_items} that are allowed"
                )
        self._add(1, items, tokens)

    def leave(self, request: ScoreRequest) -> None:
        self._add(-1, -len(request.item_ids), -request.num_tokens)

    @property
    def retry_after(self) -> int:
        """Whole seconds until what is in flight is done, as far as is known."""
        rate = self._rate()
        return whole_seconds(self.tokens / rate) if rate > 0 else 1

    def seconds_ahead(self, tokens: int) -> float:
        """For how long a request of so many tokens would wait for others.

        The scheduler deals out tokens evenly, so until this request is done, each of the others
        gets as many as it, or fewer if it has fewer. Those of one size are taken together, which
        makes this an upper bound; 0 while the rate is unknown.
        """
        rate = self._rate()
        if rate <= 0:
            return 0.0
        shares = (min(s, n * tokens) for n, s in zip(self._count, self._sum, strict=True))
        return sum(shares) / rate

    def wait_refusal(self, tokens: int, seconds: float) -> Overloaded | None:
        """An error if a request of so many tokens would wait for longer than `seconds`."""
        if self.tokens <= seconds * self._rate():  # even if it waited for all of them
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
        self._count[size] += sign
        self._sum[size] += tokens


def whole_seconds(seconds: float) -> int:
    """As Retry-After says it."""
    return max(1, min(MAX_RETRY_AFTER, round(seconds)))
