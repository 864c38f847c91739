"""The run of the server: it binds first, loads the model in a thread, and drains on SIGTERM."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from gpuscore.config import ServerConfig
from gpuscore.dialects.dialect import LARGE
from gpuscore.engine.admission import Counts
from gpuscore.server.api.app import create_app
from gpuscore.server.http.address import LOOPBACK, address_of, bind, bind_metrics
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.http.cors import read_origins
from gpuscore.server.http.descriptors import warn_of_limit
from gpuscore.server.http.gate import Gate
from gpuscore.server.http.hosts import read_hosts
from gpuscore.server.http.protocol import ScoreProtocol
from gpuscore.server.http.rounds import Listener, Postponed, Rounds
from gpuscore.server.loading import ModelLoad, ModelLoads
from gpuscore.server.metrics_port import metrics_port
from gpuscore.server.observe.operations import Operations
from gpuscore.server.observe.sums import Samples, Snapshot
from gpuscore.server.service import ANSWERS, ScoringService
from gpuscore.server.stopping import StopLines, stop_signals
from gpuscore.system.heap import return_large_blocks
from gpuscore.system.log import LogWriter, chosen_format, logging_to

if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_ERROR = 0, 1
EXIT_SIGNAL = 128  # plus the signal's number: ended with work in flight
# Seconds for which the event loop, which needs the GIL anew in each round, waits for it while a
# thread works on texts or answers; the interpreter itself would have it wait for 0.005.
SWITCH = 0.0005
LAST_READS = 2.0  # seconds, once nothing is in flight, for refusing what the kernel has received
LAST_ANSWERS = 1.0  # seconds for writing answers once all are known
FORCED_ANSWERS = 2.0  # seconds after a second signal for refusing all that is in flight
FORCED_EXIT = 3.0  # seconds after a second signal, whatever hangs


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a drain, during which it still listens and answers 503 to new requests.

    uvicorn's own shutdown, which closes the listener, begins once nothing is in flight and no bytes
    or connections of clients wait to be read, or LAST_READS seconds after nothing was in flight.
    Closing a socket with unread bytes resets its connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: ScoringService,
        operations: Operations,
        drain_timeout: float,
        stops: Sequence[signal.Signals],
        gate: Gate,
        rounds: Rounds,
        say: Callable[[str], None] = lambda line: None,
        beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(config)
        self._beside = beside  # runs as long as the server
        self.lines = StopLines(say)
        self.service, self._operations, self._gate = service, operations, gate
        self._rounds = rounds
        self.exit_code = EXIT_OK
        self._drain_timeout, self._stops = drain_timeout, stops
        self._drain_end = self._forced_end = 0.0
        self._last_look = 0.0  # until then, requests that have reached the machine are still read
        self._signal = 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {s: signal.signal(s, self.handle_exit) for s in self._stops}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.service.draining:
            self._signal, self._drain_end = sig, monotonic() + self._drain_timeout
            self.service.drain()
        elif not self.force_exit:  # a second signal: do not wait for requests in flight
            self.force_exit, self._forced_end = True, monotonic() + FORCED_ANSWERS
            threading.Thread(target=self._exit_anyway, daemon=True).start()

    async def main_loop(self) -> None:
        watching = asyncio.create_task(self._operations.watch_loop())
        try:
            async with self._beside():
                await super().main_loop()
        finally:
            watching.cancel()

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        return self.service.draining and self._drained()

    def _drained(self) -> bool:
        """Return True if the server may shut down.

        After the drain timeout or a second signal, answer 503 to requests in flight.
        """
        left = self._drain_end - monotonic()
        # Once nothing was in flight, those that wait came later. They are refused in their turn,
        # but not all of them in the short time after a second signal.
        counted = self.force_exit or not self._last_look
        busy = self.service.busy or (counted and self._gate.waiting > 0)
        self.lines.waiting(max(self._gate.requests, busy), max(0.0, left))
        if busy and not self.force_exit and left > 0:
            return False
        if busy:
            self.exit_code = EXIT_SIGNAL + self._signal
            self.service.abandon()
        self._last_look = self._last_look or monotonic() + LAST_READS
        if self.force_exit:  # uvicorn would not wait until the last answers are written
            unanswered = busy or bool(self.server_state.tasks) or self._rounds.ready
            self.config.timeout_graceful_shutdown = round(LAST_ANSWERS)
            return not unanswered or monotonic() >= self._forced_end
        # uvicorn's shutdown then waits this long for slow clients to take their answers.
        self.config.timeout_graceful_shutdown = round(max(LAST_ANSWERS, left))
        return not self._rounds.ready or monotonic() >= self._last_look

    def _exit_anyway(self) -> None:
        sleep(FORCED_EXIT)
        os._exit(EXIT_SIGNAL + self._signal)


@dataclass(frozen=True, slots=True)
class FrontShare:
    """The part of a front: one of several processes that share a port and are one server.

    Args:
        fronts: number of these processes.
        listener: listens on the port; closed at the end.
        counts: of the `Gate`, shared by the fronts.
        others: gets this front's metrics and returns the sum of the other fronts'.
        patience: seconds to wait for the model before connections are accepted.
        begun: called before the event loop starts, with the server and its metrics. It replaces
            signals, which the server's parent handles.
        has_metrics_port: it serves `--metrics-port`.
    """

    fronts: int
    listener: Listener
    counts: Counts
    others: Callable[[Snapshot], Samples]
    patience: float
    begun: Callable[[DrainingServer, Operations], None]
    has_metrics_port: bool


def serve(
    models: Sequence[ModelLoad],
    config: ServerConfig,
    keys: ApiKeys,
    announce: Callable[[str], None],
    tracer: "SpanTracer | None" = None,
    share: FrontShare | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Serve models until SIGTERM, SIGINT, or SIGHUP without a key file; return the exit code.

    Args:
        models: each one with a function that loads and warms it, which runs in a thread while
            /health already answers. If the server stops meanwhile, it does not wait for the
            threads: the caller must end the loads.
        config: the settings.
        keys: digests of the valid API keys (`read_api_keys`); none leaves every route open.
        announce: called with the server's address once all models are loaded.
        tracer: makes the spans of requests (`read_tracer`), if traces are configured.
        share: this process's part in a server of several; None = it is the whole server.
        say: prints a line for people without blocking.

    Raises:
        ConfigError: the address cannot be bound, or a load raised this.
        EngineFailed: an engine was lost at start, or all of them too often since.
    """
    return_large_blocks(LARGE)
    sys.setswitchinterval(SWITCH)
    rounds = Rounds()
    pieces = partial(rounds.pieces, ANSWERS)
    fronts, counts, others = (
        (share.fronts, share.counts, share.others) if share else (1, None, None)
    )
    served = [model for model, _ in models]
    service = ScoringService(served, config.max_queue_seconds, pieces, fronts)
    gate = Gate(service, config, keys, rounds, counts)
    style = chosen_format(config.log_format)
    with LogWriter() as log, logging_to(log, style):
        if share is None:
            warn_of_limit(config.max_connections)
        operations = Operations(
            service, log, tracer, config.log_requests, others, style, config.vllm_metrics
        )
        hosts = read_hosts(config, config.host, len(keys))
        app = create_app(service, config, keys, operations, hosts)
        protocol = partial(
            ScoreProtocol,
            server_config=config,
            operations=operations,
            gate=gate,
            turns=Postponed(rounds),
            origins=read_origins(config),
        )
        uvicorn_config = _uvicorn_config(app, config, protocol)
        stops = stop_signals(config) if share is None else []
        beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        if config.metrics_port is not None and (share is None or share.has_metrics_port):
            scraped = bind_metrics(config.metrics_host or LOOPBACK, config.metrics_port)
            scraped.rounds = rounds
            beside = partial(metrics_port, scraped, config, service, operations)
        server = DrainingServer(
            uvicorn_config,
            service,
            operations,
            config.drain_seconds,
            stops,
            gate,
            rounds,
            say,
            beside,
        )
        listener = bind(config) if share is None else share.listener
        listener.rounds = rounds
        if share is not None:
            share.begun(server, operations)
        try:
            patience = share.patience if share else 0.0
            return _run(server, service, listener, models, announce, patience)
        finally:
            if tracer is not None:
                tracer.close()


def _run(
    server: DrainingServer,
    service: ScoringService,
    sock: Listener,
    models: Sequence[ModelLoad],
    announce: Callable[[str], None],
    patience: float,
) -> int:
    def failed() -> None:
        service.fail()
        server.should_exit = True

    loading = ModelLoads(models, lambda: announce(address_of(sock)), failed)
    loading.start(patience)
    with asyncio.Runner(loop_factory=sock.rounds.loop) as runner:
        runner.run(server.serve(sockets=[sock]))
    service.close()
    if loading.error is not None:
        raise loading.error
    server.lines.stopped(server.exit_code != EXIT_OK)
    return EXIT_ERROR if service.failed else server.exit_code


def _uvicorn_config(
    app: object, config: ServerConfig, protocol: Callable[..., asyncio.BufferedProtocol]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=config.host,
        port=config.port,
        http=protocol,  # type: ignore[arg-type]  # uvicorn wants a class
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(LAST_ANSWERS),
    )
