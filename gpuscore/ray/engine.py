"""The engines of the cluster, as the HTTP layer sees them: the server's own `Replicas`, whose
engines are replicas of Ray's, each behind the same handle.

So a request goes where its query's beginning is cached, a long item list is divided, and a request
whose replica is lost, or whose engine starts again, runs once more elsewhere.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import Any, TypeAlias

from msgspec import structs
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from gpuscore.config import EngineConfig
from gpuscore.engine.ticket import resolve
from gpuscore.errors import (
    DeadlineExceeded,
    GpuscoreError,
    InternalError,
    Overloaded,
    Unavailable,
)
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.link import Report
from gpuscore.processes.worker.wire import (
    Failure,
    ProtocolError,
    Result,
    Score,
    check_result,
    decoder,
    encode,
)
from gpuscore.ray.host import Facts, fingerprint
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import NO_STATS, EngineStats, ReplicaState

logger = logging.getLogger(__name__)

PLACES = 64  # replicas that one HTTP process sends to, at most
POLL = 1.0  # seconds between two questions for the replicas' states
PATIENCE = 5.0  # seconds in which a replica must tell its state
FORGET = 15.0  # seconds after which a replica that was not heard of is gone
RETRY = 5  # seconds after which a replica may be there again
Handle: TypeAlias = "DeploymentHandle[Any]"


class Remote:
    """A place for a replica of Ray's, in the place of an `EngineClient`.

    Attributes:
        name: the replica's, under which Ray's logs have it; empty while the place is free.
        alive: True while its engine runs.
    """

    retry_after = RETRY

    def __init__(self, handle: Handle, limits: BackendLimits) -> None:
        self.name, self.device, self.alive = "", "", False
        self.started: Future[BackendLimits] = Future()
        self.started.set_result(limits)
        self.reported = Report(0, 0)
        self._handle, self._model = handle, fingerprint(limits)
        self._decode = decoder(Result | Failure)
        self._stats, self._heard = NO_STATS, 0.0

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def rate(self) -> float:
        return self._stats.capacity

    def hear(self, state: ReplicaState) -> None:
        """Note a replica's account of itself."""
        self.name, self.device, self.alive = state.replica, state.device, state.alive
        self._stats, self._heard = state.stats, monotonic()
        self.reported = Report(self.reported.number + 1, state.stats.tokens_left)

    def forget(self) -> None:
        """Free the place of a replica that was not heard of for long."""
        if monotonic() - self._heard > FORGET:
            self.name, self.alive, self._stats = "", False, NO_STATS

    def score_all(self, requests: Sequence[ScoreRequest]) -> "list[Future[ScoreResult]]":
        """Send requests; called on the event loop. Cancelling a future cancels its call."""
        loop, futures = asyncio.get_running_loop(), list[Future[ScoreResult]]()
        for request in requests:
            future: Future[ScoreResult] = Future()
            # In a context without Ray's request: calls of one context share an id, and Ray's router
            # fulfils only one call of each id.
            task = loop.create_task(self._send(request, future), context=Context())
            future.add_done_callback(lambda _, task=task: task.cancel())
            futures.append(future)
        return futures

    async def _send(self, request: ScoreRequest, future: "Future[ScoreResult]") -> None:
        try:
            async with asyncio.timeout((request.deadline or 0.0) - monotonic()):
                outcome = await self._outcome(request)
        except TimeoutError:
            outcome = DeadlineExceeded("no engine has answered in time")
        except Exception:  # a bug; it must reach the waiting caller
            logger.exception("the client of the engines has a bug")
            outcome = InternalError("the engine's client has a bug")
        if isinstance(outcome, Unavailable):
            self.alive = False  # until it is heard again
        resolve(future, outcome)

    async def _outcome(self, request: ScoreRequest) -> ScoreResult | GpuscoreError:
        # Clocks of machines differ: the message has the time that is left in the deadline's place.
        left = (request.deadline or 0.0) - monotonic()
        frame = encode(Score(0, structs.replace(request, deadline=left)))
        response = self._handle.score.remote(frame, model=self._model, replica=self.name)
        try:
            answer = self._decode(await response)
            if isinstance(answer, Failure):
                return answer.error()
            return check_result(answer.result, request)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError as error:
            return Overloaded(f"{error.args[0]} requests wait for an engine", retry_after=1)
        except (RayTaskError, ProtocolError):
            logger.exception("a replica's answer cannot be used")
            return InternalError("the engine failed")
        except (RayError, RayServeException) as error:
            logger.warning("a replica was lost with a request: %s", type(error).__name__)
            return Unavailable("the engine stopped", retry_after=RETRY)


class ClusterEngine(Replicas):
    """The engine deployment; all of it runs on one event loop.

    Args:
        handle: of the engine deployment.
        config: the limits on this process's requests in flight.
        facts: of one of the replicas; those of another model are not used.
    """

    def __init__(self, handle: Handle, config: EngineConfig, facts: Facts) -> None:
        self._places = [Remote(handle, facts.limits) for _ in range(PLACES)]
        super().__init__(self._places, [""] * PLACES, config)
        self._handle, self._model = handle, fingerprint(facts.limits)
        self._decode = decoder(Facts)
        self._hear(facts)
        self._watching = asyncio.get_running_loop().create_task(self._watch(), context=Context())

    def states(self) -> list[ReplicaState]:
        """Return the replicas by their last reports."""
        everything = zip(self._places, super().states(), strict=True)
        return [
            replace(state, replica=place.name, device=place.device)
            for place, state in everything
            if place.name
        ]

    def close(self) -> None:
        """Stop watching; the replicas are Ray's."""
        self._closing = True
        self._watching.cancel()

    def _hear(self, facts: Facts) -> None:
        """Note a replica's state at its place, which in every HTTP process follows from its name,
        so that all of them send a query to the same replica."""
        name = facts.state.replica
        if fingerprint(facts.limits) != self._model:
            return
        first = int.from_bytes(blake2b(name.encode(), digest_size=2).digest()) % PLACES
        places = [*self._places[first:], *self._places[:first]]
        own = [place for place in places if place.name == name]
        own += [place for place in places if not place.name]
        if own:
            own[0].hear(facts.state)

    async def _watch(self) -> None:
        while True:
            for place in self._places:
                place.forget()
            count = max(2, sum(bool(place.name) for place in self._places))
            await asyncio.gather(*(self._poll() for _ in range(count)))
            await asyncio.sleep(POLL)

    async def _poll(self) -> None:
        """Ask any replica for its state."""
        response = self._handle.facts.remote()
        try:
            self._hear(self._decode(await asyncio.wait_for(response, PATIENCE)))
        except TimeoutError:
            response.cancel()
        except (RayError, RayServeException, ProtocolError) as error:
            logger.debug("a replica did not tell its state: %s", type(error).__name__)
