"""The gate: admits or refuses a request at its head, before its body is read or a task exists.

An overloaded server must refuse requests at a small part of the cost of answering them. So the gate
counts requests as they come from the HTTP parser, and the connection writes a refusal at once.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from gpuscore.config import ServerConfig
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.engine.admission import Backlog
from gpuscore.errors import Overloaded
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.http.exchange import Exchange
from gpuscore.server.http.timing import Rounds
from gpuscore.server.service import ScoringService

# A round of the event loop starts the work of at most this many requests, or of requests with about
# this many bytes; the others wait. (After a long round, `Rounds.pieces` allows more.) This keeps
# rounds to some milliseconds, so that refusals and probes are answered even when a thousand
# requests arrive at once.
STARTS, START_BYTES = 8, 2**18
BEHIND = 0.5  # seconds; a loop that is this late admits no more requests
BYTES_PER_TOKEN = 4  # of a body, roughly; to estimate the wait of a request that was not read yet
# Places of a gate's counts: open connections, requests in flight, bytes of bodies and answers.


class Gate:
    """The counts of connections, of scoring requests in flight and of their bytes.

    A request counts from its complete body to the end of its answer. The bytes of its body count
    from the first one received. Once the answer is prepared, the most bytes that it may have count.

    Attributes:
        bytes: of the bodies and answers of requests in flight.
    """

    def __init__(
        self, service: ScoringService, config: ServerConfig, keys: ApiKeys, rounds: Rounds
    ) -> None:
        self.bytes = 0
        self._connections = 0
        self.tenant = keys.tenant
        self.scoring = DIALECT_OF.keys()  # paths of the requests that are counted
        self._tenants: Counter[str] = Counter()  # requests in flight of each tenant
        self._entered: set[Exchange] = set()  # requests in flight
        self._sizes: Counter[Exchange] = Counter()  # bytes of bodies
        self._more: Counter[Exchange] = Counter()  # bytes of bodies unpacked, and of answers
        self._service, self._config, self._rounds = service, config, rounds
        self._turns: deque[tuple[Exchange, Callable[[], None]]] = deque()
        # Once there are too many requests, every further one in the same round gets this refusal.
        self._refused, self._refusal = -1, Overloaded("")
        self._round = -1
        self._starts = self._start_bytes = 0

    @property
    def round(self) -> int:
        return self._rounds.number

    @property
    def requests(self) -> int:
        """Number of requests in flight."""
        return len(self._entered)

    @property
    def waiting(self) -> int:
        """Number of complete requests whose work has not begun."""
        return len(self._turns)

    @property
    def draining(self) -> bool:
        return self._service.draining

    def connect(self) -> bool:
        """Count a new connection; return False, without counting it, if there are too many."""
        if self._connections >= self._config.max_connections:
            return False
        self._connections += 1
        return True

    def disconnect(self) -> None:
        """Stop counting a connection."""
        self._connections -= 1

    def refusal(self, tenant: str, announced: int, own: int = 0) -> Overloaded | None:
        """Return the error for a request that must be refused now; None if it is admitted.

        Args:
            tenant: the owner of the request's key.
            announced: bytes of its body that are still to come, as far as is known.
            own: bytes of its body that have arrived.

        Also returns None without an engine and while draining: the service answers those requests.
        """
        if self._refused == self._rounds.number:
            return self._refusal
        backlogs = self._service.models.backlogs  # whose request it is, its body tells
        if not backlogs or self._service.draining:
            return None
        requests = self.requests
        if requests >= backlogs[0].most_requests:
            self._refused = self._rounds.number
            tokens = sum(backlog.tokens for backlog in backlogs)
            self._refusal = Overloaded(
                f"{requests} requests with {tokens} tokens are in flight",
                retry_after=_retry_after(backlogs),
            )
            return self._refusal
        if self._tenants[tenant] >= self._config.max_inflight_per_key:
            return Overloaded(
                f"{self._tenants[tenant]} requests of this API key are in flight", retry_after=1
            )
        crowded = self._crowded(own, announced)
        if crowded is not None:
            return crowded
        if self._rounds.age > BEHIND:
            return Overloaded(f"the server is {self._rounds.age:.1f} seconds late", retry_after=1)
        seconds = min(self._config.max_queue_seconds, self._config.request_timeout)
        tokens = (own + announced) // BYTES_PER_TOKEN
        refusals = [backlog.wait_refusal(tokens, seconds) for backlog in backlogs]
        # While one model has time, only `ScoringService.run` can tell that another has none.
        return None if None in refusals else refusals[0]

    def received(self, exchange: Exchange, size: int) -> Overloaded | None:
        """Count a part of a body; return an error if the bodies exceed `--max-queued-bytes`."""
        self.bytes += size
        self._sizes[exchange] += size
        full = self.bytes > self._config.max_queued_bytes
        return self.refusal(exchange.tenant, 0, self._sizes[exchange]) if full else None

    def more(self, exchange: Exchange, size: int) -> Overloaded | None:
        """Count bytes that did not arrive on the connection; `received` counts bytes that did.

        Such bytes are the unpacked part of a body, or the most that the answer may have.
        """
        self.bytes += size
        self._more[exchange] += size
        return self._crowded(self._sizes[exchange] + self._more[exchange], 0)

    def _crowded(self, own: int, announced: int) -> Overloaded | None:
        """Return an error if others have bytes here and `own` and `announced` make too many."""
        others, limit = self.bytes - own, self._config.max_queued_bytes
        if not others or others + own + announced <= limit:
            return None
        return Overloaded(
            f"{self.requests} requests with bodies and answers of {others} bytes are in flight, "
            f"the limit is {limit} bytes",
            retry_after=_retry_after(self._service.models.backlogs),
        )

    def size(self, exchange: Exchange) -> int:
        """Return the bytes of its body that have arrived."""
        return self._sizes[exchange]

    def enter(self, exchange: Exchange, start: Callable[[], None]) -> None:
        """Count a complete request and call `start`.

        The call comes at once if no request waits and the round may start more work; otherwise in a
        later round, in order of arrival.
        """
        self._entered.add(exchange)
        self._tenants[exchange.tenant] += 1
        if not self._turns and self._has_time():
            self._start(exchange, start)
            return
        self._turns.append((exchange, start))
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def leave(self, exchange: Exchange) -> None:
        """Stop counting an exchange, however it ended."""
        if exchange in self._entered:
            self._entered.remove(exchange)
            self._tenants[exchange.tenant] -= 1
            if not self._tenants[exchange.tenant]:
                del self._tenants[exchange.tenant]
        size = self._sizes.pop(exchange, 0) + self._more.pop(exchange, 0)
        self.bytes -= size

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


def _retry_after(backlogs: Sequence[Backlog]) -> int:
    """Return whole seconds until one of the models may have time."""
    return min((backlog.retry_after for backlog in backlogs), default=1)
