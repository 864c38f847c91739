"""A small `gpuscore serve`: the server's own parts over a tape in a child process.

python -P -m support.tape_server FACTORY JSON-OF-PATIENCE JSON-OF-SERVER JSON-OF-ENGINE
"""

import json
import logging
import os
import sys
import time
from contextlib import closing
from functools import partial

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.errors import EngineFailed
from gpuscore.fronts.board import Board
from gpuscore.fronts.forker import Forker
from gpuscore.fronts.front import FrontApp, run_front
from gpuscore.fronts.parent import Fronts
from gpuscore.server.api.auth import read_api_keys
from gpuscore.server.http.address import address_of, bind_all
from gpuscore.server.run import serve
from gpuscore.server.service import LoadedModel
from gpuscore.text.joining import PromptBuilder
from gpuscore.worker.client import EngineClient
from gpuscore.worker.messages import Start
from gpuscore.worker.process import EngineListener, command
from gpuscore.worker.supervisor import Patience


def main(factory, patience, server, engine):
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = ServerConfig(port=0, **json.loads(server))
    keys = read_api_keys(config)
    start = Start("/nowhere", ModelConfig(), EngineConfig(**json.loads(engine)))
    make = partial(EngineClient, command(factory), start, Patience(**json.loads(patience)))
    run = serve_alone if config.http_workers == 1 else serve_by_fronts
    try:
        return run(make, config, start.engine, keys)
    except EngineFailed as error:
        print(error, file=sys.stderr)
        return 70


def serve_alone(make, config, engine, keys):
    client = make()
    load = partial(load_tape, client)
    with closing(client):
        return serve(("tape",), config, keys, load, partial(announce, client))


def serve_by_fronts(make, config, engine, keys):
    """Serve as `gpuscore.serving` does with several HTTP workers."""
    board, listener = Board(config.http_workers, engines=1), EngineListener()
    app = FrontApp(("tape",), config, engine, keys, lambda engines: load_tape(engines[0]))
    main = partial(run_front, app, board, [listener.address])
    if os.environ.get("TAPE_FRONTS_END"):
        main = lambda seat: 1  # noqa: E731
    with closing(Forker(lambda text: main)) as forker, closing(make(listener=listener)) as client:
        forker.prepare("")
        forker.prepared()
        about = client.wait_planned()
        sockets = bind_all(config, config.http_workers)
        ready = partial(announce, client, address_of(sockets[0]))
        return Fronts(forker, board, config, keys, sockets, [client], [about], ready).run()


def load_tape(client):
    time.sleep(float(os.environ.get("TAPE_LOADS", "0")))
    builder = PromptBuilder(None, client.wait_ready(), RequestLimits())
    return LoadedModel(client, builder, client.wait_ended)


def announce(client, address):
    print(f"ready on http://{address} engine {client.pid}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
