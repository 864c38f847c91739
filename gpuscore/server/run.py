"""Runs the server: binds first, loads the model beside it, drains on SIGTERM."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.server.app import create_app
from gpuscore.server.auth import ApiKeys
from gpuscore.server.log import LogWriter, json_logging
from gpuscore.server.operations import Operations
from gpuscore.server.protocol import ScoreProtocol
from gpuscore.server.service import LoadedModel, ScoringService

if TYPE_CHECKING:
    from gpuscore.server.spans import SpanTracer

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_ERROR, EXIT_CONFIG = 0, 1, 78


class Server(uvicorn.Server):
    """uvicorn's server, with a drain that ends in exit code 0 instead of the signal's."""

    def __init__(self, config: uvicorn.Config, service: ScoringService) -> None:
        super().__init__(config)
        self.service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {s: signal.signal(s, self.handle_exit) for s in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.draining = True
        if self.should_exit:  # a second signal: do not wait for what is in flight
            self.force_exit = True
        self.should_exit = True


def serve(
    names: tuple[str, ...],
    config: ServerConfig,
    keys: ApiKeys,
    load: Callable[[], LoadedModel],
    announce: Callable[[str], None],
    tracer: "SpanTracer | None" = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Args:
        names: the model's names on the wire.
        keys: digests of the valid API keys (`read_api_keys`); none leaves every route open.
        load: loads and warms the model; runs in a thread while /health already answers.
        announce: called with the server's address once it is ready.
        tracer: where traces go (`read_tracer`), if they are wanted.

    Raises:
        ConfigError: an address that cannot be bound, or what `load` raises.
    """
    service = ScoringService(names, config.max_inflight_per_key)
    with LogWriter() as log, json_logging(log):
        operations = Operations(service, log, tracer, config.log_requests)
        app = create_app(service, config, keys, operations)
        server = Server(_uvicorn_config(app, config, operations), service)
        try:
            return _run(server, service, _bind(config), load, announce, log)
        finally:
            if tracer is not None:
                tracer.close()


def _run(
    server: Server,
    service: ScoringService,
    sock: socket.socket,
    load: Callable[[], LoadedModel],
    announce: Callable[[str], None],
    log: LogWriter,
) -> int:
    host, port = sock.getsockname()[:2]
    outcome: list[BaseException] = []
    thread = threading.Thread(
        target=_load,
        args=(service, server, load, partial(announce, _address(host, port)), outcome),
        daemon=True,
    )
    thread.start()
    asyncio.run(server.serve(sockets=[sock]))
    if thread.is_alive():
        # Told to stop while loading, which cannot be interrupted: there is nothing to lose yet.
        log.close()
        sys.stdout.flush()
        os._exit(EXIT_OK)
    service.close()
    if outcome:
        raise outcome[0]
    return EXIT_ERROR if service.failed else EXIT_OK


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _load(
    service: ScoringService,
    server: Server,
    load: Callable[[], LoadedModel],
    announce: Callable[[], None],
    outcome: list[BaseException],
) -> None:
    try:
        service.model = load()
        announce()
    except BaseException as error:  # noqa: BLE001  (raised again by serve, in the main thread)
        service.failed = True
        outcome.append(error)
        server.should_exit = True


def _uvicorn_config(app: object, config: ServerConfig, operations: Operations) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=config.host,
        port=config.port,
        http=partial(ScoreProtocol, server_config=config, operations=operations),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
    )


def _bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        sock = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:  # OverflowError: a port over 65535
        reason = getattr(error, "strerror", None) or "no such port"
        raise ConfigError(f"cannot bind {config.host}:{config.port}: {reason}") from error
    # Connections inherit it. asyncio sets it only on sockets made with an explicit protocol; an
    # answer goes out as head and body, and without it the body waits 40 ms for the head's ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
