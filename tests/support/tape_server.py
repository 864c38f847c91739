"""A small `gpuscore serve`: the server's own parts over tapes in child processes.

TAPE_MODELS has the models' names, TAPE_DEFAULT the default model's name.

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
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.errors import EngineFailed
from gpuscore.processes.fronts.front import FrontApp
from gpuscore.processes.fronts.parent import Fronts, FrontSetup
from gpuscore.processes.replicas.placement import placements
from gpuscore.processes.replicas.start import AllReplicas, start_models
from gpuscore.processes.worker.process import Patience
from gpuscore.prompts.model import ModelPrompts
from gpuscore.server.http.auth import read_api_keys
from gpuscore.server.run import serve
from gpuscore.text.joining import PromptBuilder

NAMES = os.environ.get("TAPE_MODELS", "tape").split(",")


def main(factory, patience, server, engine):
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = ServerConfig(port=0, **json.loads(server))
    keys = read_api_keys(config)
    make = partial(
        start_all,
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


def start_all(engine, factory, patience, listeners=None):
    places = placements(ModelConfig(), engine.devices)
    models = [(Path("/nowhere", name), places) for name in NAMES]
    return AllReplicas(NAMES, start_models(models, engine, factory, patience, listeners))


def served(name):
    return ServedModel(name, is_default=name == os.environ.get("TAPE_DEFAULT", NAMES[0]))


def serve_alone(make, config, keys):
    replicas = make()
    with closing(replicas):
        models = [
            (served(name), partial(load_tape, own))
            for name, own in zip(NAMES, replicas.models, strict=True)
        ]
        return serve(models, config, keys, announce)


def serve_by_fronts(make, config, keys):
    """Serve as `gpuscore.processes.serving` does with several HTTP workers."""
    engine = make.args[0]
    devices = tuple(place.device for place in placements(ModelConfig(), engine.devices))
    setup = FrontSetup(config.http_workers, [len(devices)] * len(NAMES))
    models = [(served(name), load_tape) for name in NAMES]
    app = FrontApp(models, devices, config, engine, keys)
    if os.environ.get("TAPE_FRONTS_END"):
        setup._main = lambda prepare, text: lambda seat: 1
    with (
        closing(setup.forker(lambda text: app)) as forker,
        closing(make(listeners=setup.listeners)) as replicas,
    ):
        forker.prepare("")
        forker.prepared()
        for number in range(len(NAMES)):
            replicas.wait_planned(number)
        return Fronts(setup, forker, config, keys, replicas, announce).run()


def load_tape(replicas):
    time.sleep(float(os.environ.get("TAPE_LOADS", "0")))
    builder = PromptBuilder(None, replicas.wait_ready(), RequestLimits())
    return LoadedModel(replicas, ModelPrompts(builder), replicas.wait_ended)


def announce(address):
    print(f"ready on http://{address} ", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
