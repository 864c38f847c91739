"""The listener of `--metrics-port`: metrics without a key, within limits of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import uvicorn
from uvicorn.server import ServerState

from gpuscore.config import ServerConfig
from gpuscore.server.api.app import create_metrics_app
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.http.gate import Gate
from gpuscore.server.http.headers import LOOPBACK, read_hosts, read_origins
from gpuscore.server.http.protocol import ScoreProtocol
from gpuscore.server.http.timing import Listener, Postponed, Rounds
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ScoringService

CONNECTIONS = 64  # open ones; scrapers have one each


@asynccontextmanager
async def metrics_port(
    listener: Listener,
    rounds: Rounds,
    config: ServerConfig,
    service: ScoringService,
    operations: Operations,
) -> AsyncIterator[None]:
    """Serve the metrics in the running event loop; connections do not count as the server's."""
    loop = asyncio.get_running_loop()
    protocol: Callable[..., ScoreProtocol] = partial(
        ScoreProtocol,
        server_config=config,
        operations=operations,
        gate=Gate(service, replace(config, max_connections=CONNECTIONS), ApiKeys([]), rounds),
        turns=Postponed(rounds),
        origins=read_origins(config),
    )
    hosts = read_hosts(config, config.metrics_host or LOOPBACK, keys=0)
    app = create_metrics_app(service, config, operations, hosts)
    settings = uvicorn.Config(app, lifespan="off", log_config=None)
    state = ServerState()
    server = await loop.create_server(lambda: protocol(settings, state, {}, loop), sock=listener)
    try:
        yield
    finally:
        server.close()
