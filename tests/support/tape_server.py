"""A small `gpuscore serve`: the server's own parts over a tape in a child process.

python -P -m support.tape_server FACTORY JSON-OF-PATIENCE JSON-OF-SERVER JSON-OF-ENGINE
"""

import json
import logging
import sys
from contextlib import closing
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.errors import EngineFailed
from gpuscore.replicas.start import start_replicas
from gpuscore.server.api.auth import ApiKeys
from gpuscore.server.run import serve
from gpuscore.server.service import LoadedModel
from gpuscore.text.joining import PromptBuilder
from gpuscore.worker.supervisor import Patience


def main(factory, patience, server, engine):
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    replicas = start_replicas(
        Path("/nowhere"),
        ModelConfig(),
        EngineConfig(**json.loads(engine)),
        factory,
        Patience(**json.loads(patience)),
    )

    def load():
        builder = PromptBuilder(None, replicas.wait_ready(), RequestLimits())
        return LoadedModel(replicas, builder, replicas.wait_ended)

    def announce(address):
        print(f"ready on http://{address} ", flush=True)

    with closing(replicas):
        try:
            config = ServerConfig(port=0, **json.loads(server))
            return serve(("tape",), config, ApiKeys([]), load, announce)
        except EngineFailed as error:
            print(error, file=sys.stderr)
            return 70


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
