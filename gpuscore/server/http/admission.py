"""The counts of scoring requests in flight and of their bytes, and the refusals that follow."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpuscore.config import ServerConfig
from gpuscore.dialects.served import Backlog
from gpuscore.errors import Overloaded
from gpuscore.server.service import ScoringService

BYTES_PER_TOKEN = 4  # of a body, roughly; estimates the wait of a request that is not read yet


@dataclass(slots=True)
class AdmittedRequest:
    """One scoring request whose head was admitted."""

    tenant: str  # the owner of its key
    size: int = 0  # bytes of its body, packed and unpacked, and the most that its answer may have
    entered: bool = False  # its body is complete


class Admission:
    """The requests in flight.

    A request counts from its complete body to the end of its answer, so a client that sends slowly
    holds no place. Bytes count as soon as they arrive.
    """

    def __init__(self, service: ScoringService, config: ServerConfig) -> None:
        self.requests = self.bytes = 0
        self._tenants: Counter[str] = Counter()  # requests of each
        self._service = service
        self._config = config

    def check(self, tenant: str, announced: int, received: int = 0) -> None:
        """Raise the error for a request that must be refused now.

        Without an engine no request is refused here: the service answers with the error.

        Args:
            tenant: the owner of the request's key.
            announced: bytes of its body that are still to come, as far as is known.
            received: bytes of it that have arrived.
        """
        backlogs = self._service.models.backlogs  # the model is unknown until the body is read
        if not backlogs:
            return
        if self.requests >= backlogs[0].most_requests:
            tokens = sum(backlog.tokens for backlog in backlogs)
            raise Overloaded(
                f"{self.requests} requests with {tokens} tokens are in flight",
                retry_after=soonest(backlogs),
            )
        if self._tenants[tenant] >= self._config.max_inflight_per_key:
            raise Overloaded(
                f"{self._tenants[tenant]} requests of this API key are in flight", retry_after=1
            )
        self._check_bytes(received, announced)
        seconds = min(self._config.max_queue_seconds, self._config.request_timeout)
        tokens = (received + announced) // BYTES_PER_TOKEN
        refusals = [backlog.wait_refusal(tokens, seconds) for backlog in backlogs]
        # If some models have time and others have none, `ScoringService.run` decides.
        if (first := refusals[0]) is not None and None not in refusals:
            raise first

    def add(self, request: AdmittedRequest, size: int) -> None:
        """Count bytes of a request; raise Overloaded if there are too many."""
        self.bytes += size
        request.size += size
        self._check_bytes(request.size, 0)

    def enter(self, request: AdmittedRequest) -> None:
        """Count a request whose body is complete, unless it is refused."""
        self.check(request.tenant, 0, request.size)
        request.entered = True
        self.requests += 1
        self._tenants[request.tenant] += 1

    def leave(self, request: AdmittedRequest) -> None:
        """Stop counting a request, however it ended."""
        self.bytes -= request.size
        if request.entered:
            self.requests -= 1
            self._tenants[request.tenant] -= 1
            if not self._tenants[request.tenant]:
                del self._tenants[request.tenant]

    def _check_bytes(self, received: int, announced: int) -> None:
        """Raise Overloaded if other requests have bytes, and all together exceed the limit."""
        others = self.bytes - received
        limit = self._config.max_queued_bytes
        if others and others + received + announced > limit:
            raise Overloaded(
                f"{self.requests} requests with bodies and answers of {others} bytes are in "
                f"flight, the limit is {limit} bytes",
                retry_after=soonest(self._service.models.backlogs),
            )


def soonest(backlogs: Sequence[Backlog]) -> int:
    """Return whole seconds until one of the models may have time."""
    return min((backlog.retry_after for backlog in backlogs), default=1)
