"""The replicas of a model behind one interface, which routes requests and runs lost ones again."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from gpuscore.config import EngineConfig
from gpuscore.config.served import ServedConfig
from gpuscore.engine.ticket import resolve
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError, Unavailable
from gpuscore.processes.replicas.placement import places_of_all
from gpuscore.processes.replicas.router import choose
from gpuscore.processes.worker.client import RETRY_AFTER, EngineClient
from gpuscore.processes.worker.process import DEFAULT_FACTORY, Patience, command
from gpuscore.processes.worker.wire import Start
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import ReplicaState

logger = logging.getLogger(__name__)

MAX_LOSSES = 2  # after so many lost engines a request fails, so that it cannot end all of them

ValueT = TypeVar("ValueT")


@dataclass(slots=True, eq=False)
class _Flight:
    """A request in flight, and the future of its answer."""

    request: ScoreRequest
    future: "Future[ScoreResult]" = field(default_factory=Future)
    losses: int = 0  # how many engines were lost while it was in flight
    inner: "Future[ScoreResult] | None" = None  # the replica's future


class Replicas:
    """Thread-safe access to the replicas of a model, used by `gpuscore serve` and `gpuscore.ray`.

    Every request is answered once. If a replica is lost, its requests in flight run again on
    another replica, since scoring has no effects; a request that loses MAX_LOSSES replicas fails.

    Args:
        replicas: may still be loading; `score_all` needs them loaded. `gpuscore.ray` passes objects
            of its own that have `started`, `alive`, `rate`, `stats` and `score_all`.
        devices: the name of each replica's device.
        config: the limits on all requests in flight. The server enforces them, not this class.

    Attributes:
        tokens: the tokens in flight at each replica.
    """

    def __init__(
        self, replicas: Sequence[EngineClient], devices: Sequence[str], config: EngineConfig
    ) -> None:
        self._replicas = replicas
        self._devices = devices
        self.config = config
        self._lock = threading.Lock()
        self.tokens = [0] * len(replicas)
        # For each replica, how many requests ran again after it was lost.
        self._rerun = [0] * len(replicas)
        self._closing = False

    def wait_ready(self) -> BackendLimits:
        """Block until the model is loaded and warm on every device.

        Raises:
            ConfigError: a device cannot serve the model, or the replicas would differ.
            LoadTimeout: an engine was not ready within the `load_timeout`.
            EngineFailed: an engine was lost, or closed, before it was ready.
        """
        all_limits = self._wait([replica.started for replica in self._replicas])
        for number, limits in enumerate(all_limits):
            first = all_limits[0].model
            other = limits.model
            if first != other:
                raise ConfigError(
                    f"the replicas differ: {first} on {self._devices[0]}, {other} on "
                    f"{self._devices[number]}; set the options that auto chose differently"
                )
        return all_limits[0]

    def wait_ended(self) -> None:
        """Block until `close`; raise EngineFailed once no replica can be kept running."""
        self._wait([replica.ended for replica in self._replicas])

    @property
    def about(self) -> str:
        """A description of the loaded model, for people."""
        about = dict.fromkeys(replica.about for replica in self._replicas)
        count = len(self._replicas)
        return " and ".join(about) + (f", {count} replicas" if count > 1 else "")

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

    def states(self) -> list[ReplicaState]:
        columns = zip(self._replicas, self._devices, self._rerun, strict=True)
        return [
            ReplicaState(str(number), device, replica.alive, replica.stats(), rerun=rerun)
            for number, (replica, device, rerun) in enumerate(columns)
        ]

    @property
    def rate(self) -> float:
        """Tokens per second of all replicas together; 0 while unknown."""
        return sum(replica.rate for replica in self._replicas if replica.alive)

    def score_all(self, requests: Sequence[ScoreRequest]) -> "list[Future[ScoreResult]]":
        """Queue requests without blocking. Those of the same replica are sent together.

        A future raises Unavailable if no engine is running.
        """
        if len(self._replicas) == 1:
            return self._replicas[0].score_all(requests)
        flights = [_Flight(request) for request in requests]
        self._route(flights)
        for flight in flights:
            flight.future.add_done_callback(partial(self._cancel, flight))
        return [flight.future for flight in flights]

    def close(self) -> None:
        """Fail unanswered requests with `Unavailable` and end all engines."""
        self._closing = True
        for replica in self._replicas:
            replica.close()

    def _route(self, flights: Sequence[_Flight], lost: int | None = None) -> None:
        """Send requests to replicas, but not to the replica `lost`, which just lost them."""
        chosen: dict[int, list[_Flight]] = {}
        with self._lock:
            numbers = [n for n, replica in enumerate(self._replicas) if replica.alive and n != lost]
            for flight in flights if numbers and not self._closing else ():
                loads = {number: self.tokens[number] for number in numbers}
                number = choose(flight.request, loads, self.limits)
                self.tokens[number] += flight.request.num_tokens
                chosen.setdefault(number, []).append(flight)
        if not chosen:
            for flight in flights:
                resolve(flight.future, Unavailable("no engine is running", retry_after=RETRY_AFTER))
        for number, group in chosen.items():
            inners = self._replicas[number].score_all([flight.request for flight in group])
            for flight, inner in zip(group, inners, strict=True):
                flight.inner = inner
                inner.add_done_callback(partial(self._on_done, flight, number))
                if flight.future.done():  # it was cancelled in the meantime
                    inner.cancel()

    def _on_done(self, flight: _Flight, number: int, inner: "Future[ScoreResult]") -> None:
        """Take an answer. The replica's thread calls this."""
        with self._lock:
            self.tokens[number] -= flight.request.num_tokens
        if inner.cancelled():
            return
        error = inner.exception()
        if error is None:
            resolve(flight.future, inner.result())
        elif isinstance(error, Unavailable):
            self.lost(flight, number, error)
        elif isinstance(error, GpuscoreError):
            resolve(flight.future, error)

    def lost(self, flight: _Flight, number: int, error: Unavailable) -> None:
        """Run a request again, because its replica was lost while it was in flight."""
        with self._lock:
            flight.losses += 1
            self._rerun[number] += 1
        if flight.losses < MAX_LOSSES:
            self._route([flight], lost=number)
        elif not flight.future.done():
            logger.error("a request was in flight when %d engines were lost", flight.losses)
            resolve(flight.future, error)

    def _cancel(self, flight: _Flight, future: "Future[ScoreResult]") -> None:
        if future.cancelled() and flight.inner is not None:
            flight.inner.cancel()

    def _wait(self, futures: "Sequence[Future[ValueT]]") -> list[ValueT]:
        """Return the results of all replicas; raise the first error, with its replica's name."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for number, future in enumerate(futures):
            error = future.exception() if future in done else None
            if len(futures) > 1 and isinstance(error, ConfigError | EngineFailed):
                raise type(error)(f"replica {number} on {self._devices[number]}: {error}")
        return [future.result() for future in futures]


def start_models(
    models: Sequence[ServedConfig],
    engine: EngineConfig,
    factory: str = DEFAULT_FACTORY,
    patience: Patience | None = None,
) -> list[Replicas]:
    """Start an engine of each model on each device; return each model's replicas.

    Args:
        models: the models, with their settings and directories.
        engine: the settings of all engines, with the devices.
        factory: prepares a backend (`gpuscore.processes.worker.__main__`).
        patience: decides when an engine counts as lost.

    Raises:
        ConfigError: an error of `places_of_all`. Errors of the engines themselves are raised by
            `Replicas.wait_ready` and `Replicas.wait_ended`.
    """
    all_engines: list[EngineClient] = []
    started = []
    command_line = command(factory)
    for model, places in zip(models, places_of_all(models, engine.devices), strict=True):
        engines = [
            EngineClient(
                command_line, Start(str(model.directory), place, engine), patience, all_engines
            )
            for place in places
        ]
        all_engines += engines
        started.append(Replicas(engines, [place.device for place in places], engine))
    return started
