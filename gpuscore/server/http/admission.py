"""The counts of scoring requests in flight and of their bytes, and the refusals that follow."""

from collections import Counter
from collections.abc import Callable, Sequence

from gpuscore.config import ServerConfig
from gpuscore.dialects.served import Backlog
from gpuscore.errors import Overloaded
from gpuscore.server.service import ScoringService

BEHIND = 0.5  # seconds; a loop that is this late admits no more requests
BYTES_PER_TOKEN = 4  # of a body, roughly; to estimate the wait of a request that was not read yet


class Visit:
    """One scoring request whose head was admitted.

    Attributes:
        tenant: the owner of its key.
        size: bytes of its body, packed and unpacked, and the most that its answer may have.
        entered: its body is complete.
    """

    __slots__ = ("entered", "size", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant, self.size, self.entered = tenant, 0, False


class Admission:
    """The requests in flight.

    A request counts from its complete body to the end of its answer, so a client that sends slowly
    holds no place. Bytes count as soon as they are there.

    Args:
        age: returns the seconds for which the loop has been busy in the current round.
    """

    def __init__(
        self, service: ScoringService, config: ServerConfig, age: Callable[[], float]
    ) -> None:
        self.requests = self.bytes = 0
        self._tenants: Counter[str] = Counter()  # requests of each
        self._service, self._config, self._age = service, config, age

    def refusal(self, tenant: str, announced: int, own: int = 0) -> Overloaded | None:
        """Return the error for a request that must be refused now; None if it is admitted.

        Args:
            tenant: the owner of the request's key.
            announced: bytes of its body that are still to come, as far as is known.
            own: bytes that it has here.

        Also returns None without an engine: the service answers those requests.
        """
        backlogs = self._service.models.backlogs  # whose request it is, its body tells
        if not backlogs:
            return None
        if self.requests >= backlogs[0].most_requests:
            tokens = sum(backlog.tokens for backlog in backlogs)
            return Overloaded(
                f"{self.requests} requests with {tokens} tokens are in flight",
                retry_after=_retry_after(backlogs),
            )
        if self._tenants[tenant] >= self._config.max_inflight_per_key:
            return Overloaded(
                f"{self._tenants[tenant]} requests of this API key are in flight", retry_after=1
            )
        crowded = self._crowded(own, announced)
        if crowded is not None:
            return crowded
        age = self._age()
        if age > BEHIND:
            return Overloaded(f"the server is {age:.1f} seconds late", retry_after=1)
        seconds = min(self._config.max_queue_seconds, self._config.request_timeout)
        tokens = (own + announced) // BYTES_PER_TOKEN
        refusals = [backlog.wait_refusal(tokens, seconds) for backlog in backlogs]
        # While one model has time, only `ScoringService.run` can tell that another has none.
        return None if None in refusals else refusals[0]

    def add(self, visit: Visit, size: int) -> Overloaded | None:
        """Count bytes of a request; return an error if there are too many."""
        self.bytes += size
        visit.size += size
        return self._crowded(visit.size, 0)

    def enter(self, visit: Visit) -> Overloaded | None:
        """Count a request whose body is complete, unless it is refused."""
        refusal = self.refusal(visit.tenant, 0, visit.size)
        if refusal is None:
            visit.entered = True
            self.requests += 1
            self._tenants[visit.tenant] += 1
        return refusal

    def leave(self, visit: Visit) -> None:
        """Stop counting a request, however it ended."""
        self.bytes -= visit.size
        if visit.entered:
            self.requests -= 1
            self._tenants[visit.tenant] -= 1
            if not self._tenants[visit.tenant]:
                del self._tenants[visit.tenant]

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


def _retry_after(backlogs: Sequence[Backlog]) -> int:
    """Return whole seconds until one of the models may have time."""
    return min((backlog.retry_after for backlog in backlogs), default=1)
