"""The engine deployment, and its replicas as the API server sees them: as `Replicas` whose engines
are behind Ray's handle."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import TypeAlias

from msgspec import structs
from ray import serve
from ray.exceptions import RayError
from ray.runtime_context import get_runtime_context
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.config.served import served_models
from gpuscore.errors import GpuscoreError, Unavailable
from gpuscore.processes.replicas.replicas import Replicas, start_models
from gpuscore.processes.worker import wire
from gpuscore.processes.worker.client import RETRY_AFTER
from gpuscore.ray.settings import AppSettings
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import NO_STATS, ReplicaState

logger = logging.getLogger(__name__)

PLACES = 64  # most replicas that one HTTP process sends to
POLL = 1.0  # seconds between two requests for the replicas' facts
PATIENCE = 5.0  # seconds in which the replicas must answer


class Facts(wire.Message, frozen=True):
    """A replica with its loaded model, and the settings that it started with."""

    state: ReplicaState
    limits: BackendLimits
    about: str
    model: ModelConfig
    engine: EngineConfig


class EngineHost:
    """A replica of the engine deployment. It supervises and restarts an engine process as
    `gpuscore serve` does. Ray replaces the replica if the process cannot be kept running."""

    async def __init__(self, settings: AppSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        self._settings = settings
        self._name = serve.get_replica_context().replica_id.unique_id
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        (served,) = served_models(self._settings.model, self._settings.server)
        (self._replicas,) = start_models([served.located()], self._settings.engine)
        self._limits = self._replicas.wait_ready()

    async def facts(self) -> bytes:
        """Return the `Facts`, with the replica's name in Ray's own logs."""
        (reported,) = self._replicas.states()
        state = replace(reported, replica=self._name, device=get_runtime_context().get_node_id())
        settings = self._settings
        about = self._replicas.about
        return wire.encode(Facts(state, self._limits, about, settings.model, settings.engine))

    async def score(self, frame: bytes, model: str, replica: str) -> bytes:
        """Return the `Result` or `Failure` of a `Score`. Its deadline is in seconds from now.

        Cancelling the call drops batches that are not launched yet.

        Args:
            model: the `BackendLimits.model` that the request was made for.
            replica: the replica to call; `gpuscore.ray.router` reads it.
        """
        try:
            if model != str(self._limits.model):
                raise Unavailable("the engines are switching to another model", retry_after=1)
            request = wire.check_request(_score_of(frame).request, self._limits)
            deadline = monotonic() + (request.deadline or 0.0)
            (future,) = self._replicas.score_all([structs.replace(request, deadline=deadline)])
            return wire.encode(wire.Result(0, await asyncio.wrap_future(future)))
        except (GpuscoreError, wire.ProtocolError) as error:
            return wire.encode(wire.Failure.of(0, error))

    def check_health(self) -> None:
        """Raise EngineFailed once the engine process cannot be kept running."""
        (engine,) = self._replicas.engines
        if engine.ended.done():
            engine.ended.result()

    async def __del__(self) -> None:
        if hasattr(self, "_replicas"):
            await asyncio.to_thread(self._replicas.close)


Handle: TypeAlias = "DeploymentHandle[EngineHost]"
_score_of: Callable[[bytes], wire.Score] = wire.decoder(wire.Score)
_answer: Callable[[bytes], wire.Result | wire.Failure] = wire.decoder(wire.Result | wire.Failure)
_facts: Callable[[bytes], Facts] = wire.decoder(Facts)
_FREE = ReplicaState("", "", False, NO_STATS)


async def all_facts(handle: Handle) -> list[Facts]:
    """Return the facts of all engines; an empty list if one hangs or Ray fails."""
    try:
        response = handle.broadcast("facts")
        answers = await response.results_async(timeout_s=PATIENCE, return_exceptions=True)
        return [_facts(answer) for answer in answers if isinstance(answer, bytes)]
    except (TimeoutError, RayError, RayServeException, wire.ProtocolError) as error:
        logger.debug("no facts from the replicas: %r", error)
        return []


class Remote:
    """A place for one of Ray's replicas. To `Replicas` it looks like an `EngineClient`.

    Attributes:
        state: the last report of the replica; it has no name while the place is free.
    """

    def __init__(self, handle: Handle, limits: BackendLimits) -> None:
        self._handle = handle
        self._model = str(limits.model)
        self.started: Future[BackendLimits] = Future()
        self.started.set_result(limits)
        self.update(_FREE)

    def update(self, state: ReplicaState) -> None:
        """Take the state that a replica reports."""
        self.state = state
        self.alive = state.alive
        self.rate = state.stats.capacity

    def score_all(self, requests: Sequence[ScoreRequest]) -> "list[Future[ScoreResult]]":
        """Send requests; called on the event loop. Cancelling a future cancels its call."""
        loop = asyncio.get_running_loop()
        # Each call runs in an empty context: calls of one context share Ray's request id, and Ray's
        # router fulfils only one call of each id.
        return [
            Context().run(asyncio.run_coroutine_threadsafe, self._score(request), loop)
            for request in requests
        ]

    async def _score(self, request: ScoreRequest) -> ScoreResult:
        # Machines' clocks differ, so the message has the remaining seconds as its deadline.
        left = (request.deadline or 0.0) - monotonic()
        frame = wire.encode(wire.Score(0, structs.replace(request, deadline=left)))
        response = self._handle.score.remote(frame, self._model, replica=self.state.replica)
        try:
            answer = _answer(await response)
            if isinstance(answer, wire.Result):
                return wire.check_result(answer.result, request)
            raise answer.error()
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (Unavailable, RayError, RayServeException, wire.ProtocolError) as error:
            logger.warning("a replica was lost with a request: %r", error)
            self.alive = False  # until its next report
            raise Unavailable("the engine stopped", retry_after=RETRY_AFTER) from None


class ClusterEngine(Replicas):
    """The replicas of the engine deployment; all of it runs on one event loop.

    Args:
        handle: the handle of the engine deployment.
        config: the limits on this process's requests in flight.
        facts: the facts of one of the replicas; those with another model are not used.
    """

    def __init__(self, handle: Handle, config: EngineConfig, facts: Facts) -> None:
        self._places = [Remote(handle, facts.limits) for _ in range(PLACES)]
        super().__init__(self._places, [""] * PLACES, config)  # type: ignore[arg-type]
        self._handle = handle
        self._about = facts.about
        self._update_places([facts])
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    @property
    def about(self) -> str:
        """A description of the model, for people."""
        return self._about

    def states(self) -> list[ReplicaState]:
        """Return the last reports of the replicas."""
        everything = zip(self._places, self._rerun, strict=True)
        return [replace(x.state, rerun=rerun) for x, rerun in everything if x.state.replica]

    def close(self) -> None:
        """Stop watching; the replicas are Ray's."""
        self._closing = True
        self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL)
            if facts := await all_facts(self._handle):
                self._update_places(facts)

    def _update_places(self, reported: list[Facts]) -> None:
        """Take the states of all replicas. A new one gets a place by its name, so that a query goes
        to the same replica from every HTTP process."""
        usable = (facts.state for facts in reported if facts.limits.model == self.limits.model)
        states = {state.replica: state for state in usable}
        for place in self._places:
            place.update(states.pop(place.state.replica, _FREE))
        for name, state in states.items():
            first = int.from_bytes(blake2b(name.encode(), digest_size=2).digest()) % PLACES
            places = (*self._places[first:], *self._places[:first])
            for place in [place for place in places if place.state is _FREE][:1]:
                place.update(state)
