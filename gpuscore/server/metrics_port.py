"""The listener of `--metrics-port`: metrics without a key, within limits of its own."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from uvicorn.server import ServerState

from gpuscore.config import ServerConfig
from gpuscore.server.api.app import create_metrics_app
from gpuscore.server.http.address import metrics_address
from gpuscore.server.http.headers import read_hosts
from gpuscore.server.http.protocol import SLICES, ScoreProtocol
from gpuscore.server.http.rounds import Rounds
from gpuscore.server.observe.operations import Operations
from gpuscore.server.pacer import Pacer

CONNECTIONS = 64  # open ones; scrapers have one each


@asynccontextmanager
async def metrics_port(
    listener: socket.socket,
    rounds: Rounds,
    config: ServerConfig,
    operations: Operations,
) -> AsyncIterator[None]:
    """Serve the metrics in the running event loop; connections do not count as the server's."""
    loop = asyncio.get_running_loop()
    host, _ = metrics_address(config.metrics_port or "")
    hosts = read_hosts(config, host, keys=0)
    app = create_metrics_app(config, operations, hosts)
    settings = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    state = ServerState()
    turns = Pacer(partial(rounds.pieces, SLICES))

    def protocol() -> ScoreProtocol:
        return ScoreProtocol(
            settings, state, {}, loop, gate=app, settings=config, turns=turns, most=CONNECTIONS
        )

    server = await loop.create_server(protocol, sock=listener)
    try:
        yield
    finally:
        server.close()
