"""The engines of the cluster, as the HTTP layer sees them: one engine behind a handle of Ray's.

A request goes to the replica that its query's beginning chooses. If that replica is lost, or its
engine starts again, the request runs again on the next one, since scoring has no effects.
"""

import asyncio
import logging
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from gpuscore.config import EngineConfig
from gpuscore.engine.admission import Backlog
from gpuscore.engine.ticket import resolve
from gpuscore.errors import GpuscoreError, InternalError, Overloaded, Unavailable
from gpuscore.processes.replicas.replicas import MAX_LOSSES
from gpuscore.processes.replicas.router import home_digest
from gpuscore.processes.worker.wire import Failure, ProtocolError, check_result, encode
from gpuscore.ray.messages import Ask, Facts, HostReply, OtherModel, ask, decode, fingerprint
from gpuscore.ray.router import MOST_PARTS
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import ReplicaState

logger = logging.getLogger(__name__)

POLL = 1.0  # seconds between two questions for the replicas' states
POLLS = 64  # questions without an answer, at most
QUIET = 10  # polls that no replica answers, after which there is none
FORGET = 15.0  # seconds after which a replica that was not heard of is gone
RETRY = 5  # seconds after which a replica may be there again
_CHANGED = Unavailable("the engines change to another model", retry_after=1)
Handle: TypeAlias = "DeploymentHandle[Any]"


@dataclass(slots=True)
class Known:
    """A replica that was heard of, and how many requests it lost that ran again elsewhere."""

    state: ReplicaState
    heard: float
    rerun: int = 0


class ClusterEngine:
    """The engine deployment, in the place of `Replicas`; all of it runs on one event loop.

    Args:
        handle: of the engine deployment.
        config: the limits on this process's requests in flight.
        limits: of the replicas' engines.
    """

    def __init__(self, handle: Handle, config: EngineConfig, limits: BackendLimits) -> None:
        self.limits = limits
        self._handle, self._model = handle, fingerprint(limits)
        self._prefix_cache = config.prefix_cache
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, Known] = {}
        self._quiet = 0  # polls since a replica was heard of
        self._running: dict[asyncio.Task[None], Future[ScoreResult]] = {}
        self._polls: set[asyncio.Task[None]] = set()
        self._backlog = Backlog(config, self._rate)
        self._watching = self._loop.create_task(self._watch(), context=Context())

    @property
    def alive(self) -> bool:
        """True while a replica answers, and its engine runs."""
        return self._quiet < QUIET and bool(self._running_states())

    @property
    def backlog(self) -> Backlog:
        return self._backlog

    def states(self) -> list[ReplicaState]:
        """Return the replicas by their last reports."""
        return [replace(replica.state, rerun=replica.rerun) for replica in self._known.values()]

    def score_all(
        self, requests: list[ScoreRequest]
    ) -> "list[Future[ScoreResult] | GpuscoreError]":
        """Send requests; return the future of each, or the error that refused it."""
        outcomes: list[Future[ScoreResult] | GpuscoreError] = []
        for request in requests:
            try:
                if not self.alive:
                    raise _no_engine()
                self._backlog.admit(request)
            except GpuscoreError as error:
                outcomes.append(error)
                continue
            future: Future[ScoreResult] = Future()
            # In a context without Ray's request: calls of one context share an id, and the router
            # fulfils only one call of each id.
            task = self._loop.create_task(self._run(request, future), context=Context())
            self._running[task] = future
            task.add_done_callback(partial(self._ended, request))
            future.add_done_callback(partial(self._left, task))
            outcomes.append(future)
        return outcomes

    def heard(self, state: ReplicaState) -> None:
        """Note a replica's account of itself."""
        self._quiet = 0
        known = self._known.setdefault(state.replica, Known(state, 0.0))
        known.state, known.heard = state, monotonic()

    def close(self) -> None:
        """Fail unanswered requests and stop watching; the replicas are Ray's."""
        self._watching.cancel()
        self._fail_all()

    async def _run(self, request: ScoreRequest, future: "Future[ScoreResult]") -> None:
        digest = home_digest(request, self.limits.page_size) if self._prefix_cache else None
        handle = self._handle if digest is None else self._handle.options(session_id=digest.hex())
        resolve(future, await self._rerun(handle, request))

    async def _rerun(self, handle: Handle, request: ScoreRequest) -> ScoreResult | GpuscoreError:
        """Return the outcome of the first replica in the router's order, or of the next ones.
        Replicas with another model do not count as lost."""
        losses = 0
        for attempt in range(MOST_PARTS):
            outcome = await self._tried(handle, request, attempt)
            losses += outcome is not _CHANGED
            if not isinstance(outcome, Unavailable) or losses == MAX_LOSSES:
                break
        return outcome

    async def _tried(
        self, handle: Handle, request: ScoreRequest, attempt: int
    ) -> ScoreResult | GpuscoreError:
        """Return a replica's outcome; Unavailable if the request may run again elsewhere."""
        message: Ask = ask(request, self._model)
        response = handle.score.remote(encode(message), attempt=attempt)
        try:
            reply = decode(await response, HostReply)
            self.heard(reply.state)
            if isinstance(reply.outcome, OtherModel):
                return _CHANGED
            if not isinstance(reply.outcome, Failure):
                return check_result(reply.outcome.result, request)
            error = reply.outcome.error()
            if isinstance(error, Unavailable):
                self._known[reply.state.replica].rerun += 1
            return error
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

    def _ended(self, request: ScoreRequest, task: "asyncio.Task[None]") -> None:
        future = self._running.pop(task)
        self._backlog.leave(request)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the client of the engines has a bug", exc_info=error)
        resolve(future, InternalError("the engine's client has a bug"))  # unless it has an outcome

    def _left(self, task: "asyncio.Task[None]", future: "Future[ScoreResult]") -> None:
        """Cancel the call of a future that was cancelled or failed, whichever thread did that."""
        if not task.done():
            self._loop.call_soon_threadsafe(task.cancel)

    async def _watch(self) -> None:
        """Ask for states; fail the requests in flight once no replica answers any more."""
        while True:
            for _ in range(min(max(2, len(self._known)), POLLS - len(self._polls))):
                poll = self._loop.create_task(self._poll(), context=Context())
                self._polls.add(poll)
                poll.add_done_callback(self._polls.discard)
            await asyncio.sleep(POLL)
            self._quiet += 1
            if self._quiet >= QUIET:
                self._fail_all()
            self._known = {
                name: replica
                for name, replica in self._known.items()
                if monotonic() - replica.heard < FORGET
            }

    async def _poll(self) -> None:
        """Ask one of the replicas, in turn."""
        response = self._handle.facts.remote()
        try:
            answer = await asyncio.wait_for(response, QUIET * POLL)
            self.heard(decode(answer, Facts).state)
        except TimeoutError:
            response.cancel()
        except (RayError, RayServeException, ProtocolError) as error:
            logger.debug("a replica did not tell its state: %s", type(error).__name__)

    def _running_states(self) -> list[ReplicaState]:
        return [replica.state for replica in self._known.values() if replica.state.alive]

    def _rate(self) -> float:
        return sum(state.stats.capacity for state in self._running_states())

    def _fail_all(self) -> None:
        for future in list(self._running.values()):
            resolve(future, _no_engine())


def _no_engine() -> Unavailable:
    return Unavailable("no engine is running", retry_after=RETRY)
