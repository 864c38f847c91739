"""The run of the server: it binds first, loads the model in a thread, and drains on SIGTERM."""

import asyncio
import gc
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import uvicorn

from gpuscore.config import ServerConfig
from gpuscore.dialects.dialect import LARGE
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.exits import EXIT_FAILED, EXIT_OK
from gpuscore.server.api.app import create_app
from gpuscore.server.http.address import ACCEPTS, address_of, bind, connections_here
from gpuscore.server.http.headers import ApiKeys, read_hosts
from gpuscore.server.http.protocol import ScoreProtocol
from gpuscore.server.http.rounds import Rounds
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ANSWERS, Pacer, ScoringService
from gpuscore.server.stopping import LAST_ANSWERS, DrainingServer
from gpuscore.system.heap import return_large_blocks
from gpuscore.system.log import LogWriter, logging_to

if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer

# The event loop needs the GIL in each round. If another thread holds it, the loop asks for it after
# this many seconds; Python's default is 0.005.
SWITCH = 0.0005

ModelLoad: TypeAlias = tuple[ServedModel, Callable[[], LoadedModel]]


def serve(
    models: Sequence[ModelLoad],
    config: ServerConfig,
    keys: ApiKeys,
    announce: Callable[[str], None],
    tracer: "SpanTracer | None" = None,
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
        say: prints a line for people without blocking.

    Raises:
        ConfigError: the address cannot be bound, or a load raised this.
        EngineFailed: an engine was lost at start, or all of them were lost too often later.
    """
    return_large_blocks(LARGE)
    sys.setswitchinterval(SWITCH)
    rounds = Rounds()
    served = [model for model, _ in models]
    answers = Pacer(partial(rounds.pieces, ANSWERS))
    service = ScoringService(served, config.max_queue_seconds, answers)
    with LogWriter() as log, logging_to(log):
        operations = Operations(service, log, tracer, config.log_requests)
        hosts = read_hosts(config, len(keys))
        gate = create_app(service, config, keys, operations, hosts=hosts, pieces=rounds.pieces)
        most = connections_here(config.max_connections)
        uvicorn_config = uvicorn.Config(
            gate,
            backlog=ACCEPTS,
            http=partial(ScoreProtocol, gate=gate, most=most),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=round(LAST_ANSWERS),
        )
        server = DrainingServer(uvicorn_config, gate, rounds, say)
        listener = bind(config)
        try:
            return _run(server, listener, models, announce)
        finally:
            if tracer is not None:
                tracer.close()


def _run(
    server: DrainingServer,
    sock: socket.socket,
    models: Sequence[ModelLoad],
    announce: Callable[[str], None],
) -> int:
    """Serve while threads load the models; a load that fails, or an engine that fails for good,
    ends the server."""
    service = server.service
    errors = list[BaseException]()
    lock = threading.Lock()

    def run(served: ServedModel, load: Callable[[], LoadedModel]) -> None:
        try:
            model = load()
            gc.collect()
            gc.freeze()  # all objects made so far stay, so garbage collection need not visit them
            with lock:
                served.loaded = model
                last = all(other.loaded is not None for other, _ in models)
            if last:
                announce(address_of(sock))
            model.wait_ended()
        except BaseException as error:  # noqa: BLE001  (raised again below, in the main thread)
            errors.append(error)
            service.failed = server.should_exit = True

    for model in models:
        threading.Thread(target=run, args=model, daemon=True).start()
    loop = partial(asyncio.SelectorEventLoop, server.rounds)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(server.serve(sockets=[sock]))
    service.close()
    if errors:
        raise errors[0]
    ended = "" if server.exit_code == EXIT_OK else ", with requests in flight that got 503"
    server.say(f"gpuscore: stopped{ended}")
    return EXIT_FAILED if service.failed else server.exit_code
