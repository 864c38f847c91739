"""A small `gpuscore serve`: the server's own parts over a tape in a child process.

python -P -m support.tape_server FACTORY JSON-OF-PATIENCE JSON-OF-SERVER JSON-OF-ENGINE
"""

import json
import logging
import sys
from contextlib import closing

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.errors import EngineFailed
from gpuscore.server.api.auth import ApiKeys
from gpuscore.server.run import serve
from gpuscore.server.service import LoadedModel
from gpuscore.text.joining import PromptBuilder
from gpuscore.worker.client import EngineClient
from gpuscore.worker.messages import Start
from gpuscore.worker.process import command
from gpuscore.worker.supervisor import Patience


def main(factory, patience, server, engine):
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    start = Start("/nowhere", ModelConfig(), EngineConfig(**json.loads(engine)))
    client = EngineClient(command(factory), start, Patience(**json.loads(patience)))

    def load():
        builder = PromptBuilder(None, client.wait_ready(), RequestLimits())
        return LoadedModel(client, builder, client.wait_ended)

    def announce(address):
        print(f"ready on http://{address} engine {client.pid}", flush=True)

    with closing(client):
        try:
            config = ServerConfig(port=0, **json.loads(server))
            return serve(("tape",), config, ApiKeys([]), load, announce)
        except EngineFailed as error:
            print(error, file=sys.stderr)
            return 70


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
