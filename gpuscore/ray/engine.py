"""The engines of the cluster, as the HTTP layer sees them: the server's own `Replicas`, whose
engines are replicas of Ray's behind a handle.

So a request goes where its query's beginning is cached, a long item list is divided, and a request
whose replica is lost, or whose engine starts again, runs once more elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import Any, TypeAlias

from msgspec import structs
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from gpuscore.config import EngineConfig
from gpuscore.errors import Unavailable
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import RETRY_AFTER
from gpuscore.processes.worker.wire import (
    Failure,
    ProtocolError,
    Result,
    Score,
    check_result,
    decoder,
    encode,
)
from gpuscore.ray.host import Facts, model_of
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import NO_STATS, ReplicaState

logger = logging.getLogger(__name__)

PLACES = 64  # replicas that one HTTP process sends to, at most
POLL = 1.0  # seconds between two questions for the replicas' states
PATIENCE = 5.0  # seconds in which they must tell them
Handle: TypeAlias = "DeploymentHandle[Any]"
_answer: Callable[[bytes], Result | Failure] = decoder(Result | Failure)
_facts: Callable[[bytes], Facts] = decoder(Facts)
_NOBODY = ReplicaState("", "", False, NO_STATS)


async def all_facts(handle: Handle) -> list[Facts] | None:
    """Return the facts of all engines that answer; None if there is none, or one hangs."""
    try:
        response = handle.broadcast("facts")
        answers = await response.results_async(timeout_s=PATIENCE, return_exceptions=True)
        return [_facts(answer) for answer in answers if isinstance(answer, bytes)]
    except (TimeoutError, RayError, RayServeException, ProtocolError) as error:
        logger.debug("the replicas did not tell their states: %s", type(error).__name__)
        return None


class Remote:
    """A place for a replica of Ray's, which looks like an `EngineClient` to `Replicas`.

    Attributes:
        state: of the replica, as it was last heard of; without a name while the place is free.
        alive: True while its engine runs.
    """

    def __init__(self, handle: Handle, limits: BackendLimits) -> None:
        self._handle, self._model = handle, model_of(limits)
        self.started: Future[BackendLimits] = Future()
        self.started.set_result(limits)
        self.hear(_NOBODY)

    @property
    def rate(self) -> float:
        return self.state.stats.capacity

    def hear(self, state: ReplicaState) -> None:
        """Note a replica's account of itself."""
        self.state, self.alive = state, state.alive

    def score_all(self, requests: Sequence[ScoreRequest]) -> "list[Future[ScoreResult]]":
        """Send requests; called on the event loop. Cancelling a future cancels its call."""
        loop = asyncio.get_running_loop()
        # In contexts without Ray's request: calls of one context share an id, and Ray's router
        # fulfils only one call of each id.
        return [
            Context().run(asyncio.run_coroutine_threadsafe, self._score(request), loop)
            for request in requests
        ]

    async def _score(self, request: ScoreRequest) -> ScoreResult:
        # Clocks of machines differ: the message has the time that is left in the deadline's place.
        left = (request.deadline or 0.0) - monotonic()
        frame = encode(Score(0, structs.replace(request, deadline=left)))
        response = self._handle.score.remote(frame, self._model, replica=self.state.replica)
        try:
            answer = _answer(await response)
            if isinstance(answer, Result):
                return check_result(answer.result, request)
            raise answer.error()
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (Unavailable, RayError, RayServeException, ProtocolError) as error:
            logger.warning("a replica was lost with a request: %r", error)
            self.alive = False  # until it is heard again
            raise Unavailable("the engine stopped", retry_after=RETRY_AFTER) from None


class ClusterEngine(Replicas):
    """The engine deployment; all of it runs on one event loop.

    Args:
        handle: of the engine deployment.
        config: the limits on this process's requests in flight.
        facts: of one of the replicas; those with another model are not used.
    """

    def __init__(self, handle: Handle, config: EngineConfig, facts: Facts) -> None:
        self._places = [Remote(handle, facts.limits) for _ in range(PLACES)]
        super().__init__(self._places, [""] * PLACES, config)  # type: ignore[arg-type]
        self._handle, self._model, self._about = handle, model_of(facts.limits), facts.about
        self._hear([facts])
        self._watching = asyncio.get_running_loop().create_task(self._watch(), context=Context())

    def wait_planned(self) -> str:
        """Return a description of the model, for people."""
        return self._about

    def states(self) -> list[ReplicaState]:
        """Return the replicas by their last reports."""
        everything = zip(self._places, self._rerun, strict=True)
        return [replace(x.state, rerun=rerun) for x, rerun in everything if x.state.replica]

    def close(self) -> None:
        """Stop watching; the replicas are Ray's."""
        self._closing = True
        self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL)
            if (heard := await all_facts(self._handle)) is not None:
                self._hear(heard)

    def _hear(self, heard: list[Facts]) -> None:
        """Note the states of all replicas, and which there are.

        A new one gets a place that follows from its name, so that a query's home is the same one in
        every HTTP process.
        """
        own = (facts.state for facts in heard if model_of(facts.limits) == self._model)
        states = {state.replica: state for state in own}
        for place in self._places:
            place.hear(states.pop(place.state.replica, _NOBODY))
        for name, state in states.items():
            first = int.from_bytes(blake2b(name.encode(), digest_size=2).digest()) % PLACES
            places = (*self._places[first:], *self._places[:first])
            for place in [place for place in places if place.state is _NOBODY][:1]:
                place.hear(state)
