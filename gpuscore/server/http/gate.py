"""Who is let in: decided at a request's head, before there is a body, a task or any work.

When a server has more to do than it can, saying no must cost much less than doing the work, or
there is no time left for either. So requests are counted here, where they come from the HTTP
parser, and a refusal is a few bytes that the connection writes at once.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from gpuscore.config import ServerConfig
from gpuscore.errors import Overloaded
from gpuscore.server.api.auth import ApiKeys
from gpuscore.server.http.exchange import Exchange
from gpuscore.server.http.rounds import Rounds
from gpuscore.server.service import ScoringService

# A round of the event loop begins the work of so many requests, or on so many bytes of theirs; the
# others wait (`Rounds.pieces` is for rounds that are long all the same). That keeps rounds to some
# milliseconds, so that refusals and probes are answered although a thousand requests came at once.
STARTS, START_BYTES = 8, 2**18
BEHIND = 0.5  # seconds; a loop that is this late reads no more bodies
BYTES_PER_TOKEN = 4  # of a body, about; for the wait of a request that was not read yet


class Gate:
    """Counts score requests in flight, from their complete body to the end of their answer, and
    the bytes of their bodies, from the first byte received."""

    def __init__(
        self, service: ScoringService, config: ServerConfig, keys: ApiKeys, rounds: Rounds
    ) -> None:
        self.requests = 0
        self.bytes = 0
        self.tenant = keys.tenant
        self._tenants: Counter[str] = Counter()  # requests in flight of each
        self._entered: set[Exchange] = set()
        self._sizes: Counter[Exchange] = Counter()  # bytes of bodies
        self._service, self._config, self._rounds = service, config, rounds
        self._turns: deque[tuple[Exchange, Callable[[], None]]] = deque()
        # Too many requests at one time of a round are so for the rest of it, however many ask.
        self._refused, self._refusal = -1, Overloaded("")
        self._round = -1
        self._starts = self._start_bytes = 0

    @property
    def round(self) -> int:
        return self._rounds.number

    @property
    def waiting(self) -> int:
        """Complete requests whose work has not begun."""
        return len(self._turns)

    @property
    def draining(self) -> bool:
        return self._service.draining

    def refusal(self, tenant: str, announced: int, own: int = 0) -> Overloaded | None:
        """Why a request would not be let in now, if it would not.

        Args:
            tenant: whose it is.
            announced: bytes of its body that are still to come, as far as is known.
            own: bytes that came already.

        None also where there is another answer: without an engine, and while draining.
        """
        if self._refused == self._rounds.number:
            return self._refusal
        model = self._service.model
        if model is None or self._service.draining or not model.engine.alive:
            return None
        backlog, requests = model.engine.backlog, self.requests
        if requests >= backlog.config.max_queued_requests:
            self._refused = self._rounds.number
            self._refusal = Overloaded(
                f"{requests} requests with {backlog.tokens} tokens are in flight",
                retry_after=backlog.retry_after,
            )
            return self._refusal
        if self._tenants[tenant] >= self._config.max_inflight_per_key:
            return Overloaded(
                f"{self._tenants[tenant]} requests of this API key are in flight", retry_after=1
            )
        others, limit = self.bytes - own, self._config.max_queued_bytes
        if others and self.bytes + announced > limit:
            return Overloaded(
                f"{requests} requests and bodies of {others} bytes are in flight, the limit is "
                f"{limit} bytes",
                retry_after=backlog.retry_after,
            )
        if self._rounds.age > BEHIND:
            return Overloaded(f"the server is {self._rounds.age:.1f} seconds late", retry_after=1)
        seconds = min(self._config.max_queue_seconds, self._config.request_timeout)
        return backlog.wait_refusal((own + announced) // BYTES_PER_TOKEN, seconds)

    def received(self, exchange: Exchange, size: int) -> Overloaded | None:
        """Count a part of a body; an error if there is no memory for it."""
        self.bytes += size
        self._sizes[exchange] += size
        full = self.bytes > self._config.max_queued_bytes
        return self.refusal(exchange.tenant, 0, self._sizes[exchange]) if full else None

    def size(self, exchange: Exchange) -> int:
        """Bytes of its body so far."""
        return self._sizes[exchange]

    def enter(self, exchange: Exchange, start: Callable[[], None]) -> None:
        """Count a complete request, and call `start` in its turn: now, if nobody waits."""
        self._entered.add(exchange)
        self.requests += 1
        self._tenants[exchange.tenant] += 1
        if not self._turns and self._has_time():
            self._start(exchange, start)
            return
        self._turns.append((exchange, start))
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def leave(self, exchange: Exchange) -> None:
        """An exchange is over, however it ended."""
        if exchange in self._entered:
            self._entered.remove(exchange)
            self.requests -= 1
            self._tenants[exchange.tenant] -= 1
            if not self._tenants[exchange.tenant]:
                del self._tenants[exchange.tenant]
        self.bytes -= self._sizes.pop(exchange, 0)

    def _next(self) -> None:
        while self._turns and self._has_time():
            self._start(*self._turns.popleft())
        if self._turns:
            asyncio.get_running_loop().call_soon(self._next)  # in the next round

    def _has_time(self) -> bool:
        if self._round != self._rounds.number:
            self._round, self._starts, self._start_bytes = self._rounds.number, 0, 0
        return self._starts < self._rounds.pieces(STARTS) and self._start_bytes < START_BYTES

    def _start(self, exchange: Exchange, start: Callable[[], None]) -> None:
        self._starts += 1
        self._start_bytes += self._sizes[exchange]
        start()
