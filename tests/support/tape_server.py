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
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.errors import EngineFailed
from gpuscore.fronts.front import FrontApp, FrontModel
from gpuscore.fronts.start import FrontSetup
from gpuscore.replicas.placement import placements
from gpuscore.replicas.start import start_replicas
from gpuscore.server.api.auth import read_api_keys
from gpuscore.server.run import serve
from gpuscore.server.served import LoadedModel, ServedModel
from gpuscore.text.joining import PromptBuilder
from gpuscore.worker.patience import Patience


def main(factory, patience, server, engine):
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = ServerConfig(port=0, **json.loads(server))
    keys = read_api_keys(config)
    make = partial(
        start_replicas,
        Path("/nowhere"),
        ModelConfig(),
        EngineConfig(**json.loads(engine)),
        factory,
        Patience(**json.loads(patience)),
    )
    run = serve_alone if config.http_workers == 1 else serve_by_fronts
    try:
        return run(make, config, keys)
    except EngineFailed as error:
        print(error, file=sys.stderr)
        return 70


def serve_alone(make, config, keys):
    replicas = make()
    with closing(replicas):
        models = [(ServedModel("tape"), partial(load_tape, replicas))]
        return serve(models, config, keys, announce)


def serve_by_fronts(make, config, keys):
    """Serve as `gpuscore.serving` does with several HTTP workers."""
    engine = make.args[2]
    devices = tuple(place.device for place in placements(ModelConfig(), engine.devices))
    setup = FrontSetup(config.http_workers, [len(devices)])
    model = FrontModel(ServedModel("tape"), devices, load_tape)
    app = FrontApp([model], config, engine, keys)
    if os.environ.get("TAPE_FRONTS_END"):
        setup._main = lambda prepare, text: lambda seat: 1
    with (
        closing(setup.forker(lambda text: app)) as forker,
        closing(make(listeners=setup.listeners)) as replicas,
    ):
        forker.prepare("")
        forker.prepared()
        replicas.wait_planned()
        return setup.run(forker, config, keys, replicas, replicas.engines, announce)


def load_tape(replicas):
    time.sleep(float(os.environ.get("TAPE_LOADS", "0")))
    builder = PromptBuilder(None, replicas.wait_ready(), RequestLimits())
    return LoadedModel(replicas, builder, replicas.wait_ended)


def announce(address):
    print(f"ready on http://{address} ", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
