"""A small `gpuscore serve`: the server's own parts over tapes in child processes.

TAPE_MODELS has the models' names.

python -P -m support.tape_server FACTORY JSON-OF-PATIENCE JSON-OF-SERVER JSON-OF-ENGINE
"""

import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import ServedConfig
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.errors import EngineFailed
from gpuscore.processes.replicas.replicas import start_models
from gpuscore.processes.worker.process import Patience
from gpuscore.prompts.model import ModelPrompts
from gpuscore.server.http.headers import read_api_keys
from gpuscore.server.run import serve
from gpuscore.text.joining import PromptBuilder

NAMES = os.environ.get("TAPE_MODELS", "tape").split(",")


def main(factory, patience, server, engine):
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = ServerConfig(port=0, **json.loads(server))
    keys = read_api_keys(config)
    try:
        return serve_tapes(
            EngineConfig(**json.loads(engine)),
            factory,
            Patience(**json.loads(patience)),
            config,
            keys,
        )
    except EngineFailed as error:
        print(error, file=sys.stderr)
        return 70


def serve_tapes(engine, factory, patience, config, keys):
    model = ModelConfig(device="auto" if engine.devices else "cpu", kv_cache_size=2**20)
    tapes = [ServedConfig(name, model, directory=Path("/nowhere", name)) for name in NAMES]
    with ExitStack() as ending:
        replicas = start_models(tapes, engine, factory, patience)
        for own in replicas:
            ending.callback(own.close)
        models = [
            (ServedModel(name), partial(load_tape, own))
            for name, own in zip(NAMES, replicas, strict=True)
        ]
        return serve(models, config, keys, announce)


def load_tape(replicas):
    time.sleep(float(os.environ.get("TAPE_LOADS", "0")))
    builder = PromptBuilder(None, replicas.wait_ready(), RequestLimits())
    return LoadedModel(replicas, ModelPrompts(builder), replicas.wait_ended, config=replicas.config)


def announce(address):
    print(f"ready on http://{address} ", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
