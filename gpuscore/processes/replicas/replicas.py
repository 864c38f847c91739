"""The replicas of a model: one engine in front of many, which routes, divides and runs again."""

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from gpuscore.config import EngineConfig
from gpuscore.engine.admission import Backlog
from gpuscore.engine.ticket import resolve
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError, InternalError, Unavailable
from gpuscore.processes.replicas.flight import Flight, Part, split
from gpuscore.processes.replicas.router import InFlight, Load, Router
from gpuscore.processes.worker.client import EngineClient
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import renumbered
from gpuscore.types.stats import ReplicaState

logger = logging.getLogger(__name__)

MAX_LOSSES = 2  # of engines during one request: a request that ends engines must not end them all

ValueT = TypeVar("ValueT")


class Replicas:
    """Thread-safe front of replicas; with one replica it adds nothing.

    Every request is answered once. If a replica is lost, its requests in flight run again on
    another replica, since scoring has no effects; a request that loses MAX_LOSSES replicas fails.

    Args:
        replicas: loaded or still loading; `score_all` needs them loaded.
        devices: their names.
        config: the limits on all requests in flight.
    """

    def __init__(
        self, replicas: Sequence[EngineClient], devices: Sequence[str], config: EngineConfig
    ) -> None:
        self._replicas, self._devices, self._config = replicas, devices, config
        self._lock = threading.Lock()
        self._work = [InFlight() for _ in replicas]
        self._rerun = [0] * len(replicas)  # parts that were run again after each one's losses
        self._router: Router | None = None
        self._closing = False
        self._backlog = Backlog(
            config, lambda: sum(replica.rate for replica in replicas if replica.alive)
        )

    def wait_planned(self) -> str:
        """Return a description of the planned model, for people; raises as `wait_ready`."""
        about = list(dict.fromkeys(self._wait([replica.planned for replica in self._replicas])))
        count = len(self._replicas)
        return " and ".join(about) + (f", {count} replicas" if count > 1 else "")

    def wait_ready(self) -> BackendLimits:
        """Block until the model is loaded and warm on every device.

        Raises:
            ConfigError: the model cannot be served on one of them, or not the same way on all.
            LoadTimeout: an engine was not ready within the `load_timeout`.
            EngineFailed: an engine was lost, or closed, before it was ready.
        """
        everywhere = self._wait([replica.started for replica in self._replicas])
        for number, limits in enumerate(everywhere):
            first, other = _model(everywhere[0]), _model(limits)
            if first != other:
                raise ConfigError(
                    f"the replicas differ: {first} on {self._devices[0]}, {other} on "
                    f"{self._devices[number]}; set the options that auto chooses differently"
                )
        return everywhere[0]

    def wait_ended(self) -> None:
        """Block until `close`; raise EngineFailed once no replica can be kept running."""
        self._wait([replica.ended for replica in self._replicas])

    @property
    def engines(self) -> Sequence[EngineClient]:
        return self._replicas

    @property
    def limits(self) -> BackendLimits:
        """The backend limits of the first replica; blocks until it is ready."""
        return self._replicas[0].started.result()

    @property
    def alive(self) -> bool:
        return any(replica.alive for replica in self._replicas) and not self._closing

    @property
    def backlog(self) -> Backlog:
        return self._replicas[0].backlog if len(self._replicas) == 1 else self._backlog

    def states(self) -> list[ReplicaState]:
        everything = zip(self._replicas, self._devices, self._rerun, strict=True)
        return [
            ReplicaState(str(number), device, replica.alive, replica.stats(), rerun)
            for number, (replica, device, rerun) in enumerate(everything)
        ]

    def score_all(
        self, requests: Sequence[ScoreRequest]
    ) -> "list[Future[ScoreResult] | GpuscoreError]":
        """Queue requests without blocking; requests to the same replica go together.

        Returns:
            For each request, its future, or the error that refused it: Overloaded, Unavailable.
        """
        if len(self._replicas) == 1:
            return self._replicas[0].score_all(requests)
        outcomes: list[Future[ScoreResult] | GpuscoreError] = []
        flights: list[Flight] = []
        with self._lock:
            for request in requests:
                try:
                    if not self.alive:
                        raise self._unavailable("no engine is running")
                    self._backlog.admit(request)
                except GpuscoreError as error:
                    outcomes.append(error)
                    continue
                flights.append(Flight(request))
                outcomes.append(flights[-1].future)
        for flight in flights:
            flight.future.add_done_callback(partial(self._leave, flight))
        self._route(flights)
        return outcomes

    def close(self) -> None:
        """Fail unanswered requests with `Unavailable` and end all engines."""
        self._closing = True
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            for _ in pool.map(lambda replica: replica.close(), self._replicas):
                pass

    def _route(self, flights: Iterable[Flight]) -> None:
        """Divide new requests among the replicas and send them."""
        parts: list[Part] = []
        with self._lock:
            for flight in flights:
                loads = self._loads()
                if not loads:
                    continue
                shares = self._router_here().divide(flight.divided, loads)
                requests = split(flight.divided, [size for _, size in shares])
                first = 0
                for request, (load, _) in zip(requests, shares, strict=False):
                    tokens = self._router_here().sent(request, load.replica)
                    flight.parts.append(Part(flight, request, load.replica, tokens, first))
                    first += len(request.item_ids)
                    self._work[load.replica].add(tokens)
                parts += flight.parts
        for flight in flights:
            if not flight.parts:
                resolve(flight.future, self._unavailable("no engine is running"))
        self._send(parts)

    def _reroute(self, part: Part, refused: Sequence[int] = ()) -> bool:
        """Choose another replica for a part; return False if there is none."""
        with self._lock:
            loads = [load for load in self._loads() if load.replica not in refused]
            if not loads or self._closing:
                return False
            router = self._router_here()
            part.replica = router.choose(part.request, loads).replica
            part.tokens = router.sent(part.request, part.replica)
            part.inner = None
            self._work[part.replica].add(part.tokens)
        return True

    def _send(self, parts: Iterable[Part], refused: tuple[int, ...] = ()) -> None:
        """Send parts to their replicas; choose another replica for each refused part."""
        of_replica: dict[int, list[Part]] = {}
        for part in parts:
            of_replica.setdefault(part.replica, []).append(part)
        for number, together in of_replica.items():
            outcomes = self._replicas[number].score_all([part.request for part in together])
            for part, outcome in zip(together, outcomes, strict=True):
                if not isinstance(outcome, Future):
                    self._forget(part)
                    again = isinstance(outcome, Unavailable)
                    if again and self._reroute(part, (*refused, number)):
                        self._send([part], (*refused, number))
                    else:
                        self._end(part.flight, outcome)
                    continue
                part.inner = outcome
                outcome.add_done_callback(partial(self._done, part))
                if part.flight.future.done():  # it was cancelled, or another part has failed
                    outcome.cancel()

    def _done(self, part: Part, future: "Future[ScoreResult]") -> None:
        """Take a part's answer; called in the thread of its replica."""
        self._forget(part)
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._keep(part, future.result())
        elif isinstance(error, Unavailable):
            self._lost(part, error)
        elif isinstance(error, GpuscoreError):
            self._end(part.flight, renumbered(error, part.places))
        else:
            self._end(part.flight, InternalError("the engine's client has a bug"))

    def _keep(self, part: Part, result: ScoreResult) -> None:
        with self._lock:
            part.result = result
            results = part.flight.results
        if results is not None:
            resolve(part.flight.future, part.flight.whole(results))

    def _lost(self, part: Part, error: Unavailable) -> None:
        """Run a part again that was in flight when its replica was lost."""
        flight = part.flight
        with self._lock:
            flight.losses += 1
            self._rerun[part.replica] += 1
            self._router_here().lost(part.replica)
            losses = flight.losses
        if flight.future.done():
            return
        if losses < MAX_LOSSES and self._reroute(part, (part.replica,)):
            self._send([part])
            return
        if losses >= MAX_LOSSES:
            logger.error("a request was in flight when %d engines were lost", losses)
        self._end(flight, self._unavailable(error.message))

    def _end(self, flight: Flight, error: GpuscoreError) -> None:
        """Fail a request, and give up its other parts."""
        resolve(flight.future, error)
        flight.give_up()

    def _leave(self, flight: Flight, future: "Future[ScoreResult]") -> None:
        with self._lock:
            self._backlog.leave(flight.request)
        if future.cancelled():
            flight.give_up()

    def _forget(self, part: Part) -> None:
        with self._lock:
            self._work[part.replica].remove(part.tokens)

    def _loads(self) -> list[Load]:
        loads = []
        for number, replica in enumerate(self._replicas):
            if replica.alive:
                left = self._work[number].left(replica.reported)
                loads.append(Load(number, left, replica.rate))
            else:
                self._router_here().lost(number)
        return loads

    def _router_here(self) -> Router:
        if self._router is None:
            self._router = Router(self.limits, self._config.prefix_cache)
        return self._router

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(why, retry_after=min(replica.retry_after for replica in self._replicas))

    def _wait(self, futures: "Sequence[Future[ValueT]]") -> list[ValueT]:
        """Return the results of all replicas; raise the first error, with its replica's name."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for number, future in enumerate(futures):
            error = future.exception() if future in done else None
            if len(futures) > 1 and isinstance(error, ConfigError | EngineFailed):
                raise type(error)(f"replica {number} on {self._devices[number]}: {error}")
            if error is not None:
                raise error
        return [future.result() for future in futures]


def _model(limits: BackendLimits) -> dict[str, object]:
    """Return the limits by which prompts are checked and scores compared."""
    names = ("identity", "vocab_rows", "classes", "max_model_len", "page_size")
    return {name: getattr(limits, name) for name in names}
