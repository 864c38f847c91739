"""Serves the fake backend as gpuscore/processes/serving.py serves models; its flags are ignored."""

import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from gpuscore.backends.base import Prepared
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import ServedConfig
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.processes.replicas.replicas import start_models
from gpuscore.prompts.model import ModelPrompts
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.run import serve
from gpuscore.text.joining import PromptBuilder
from support.fake import FakeBackend


def prepare(directory: object, config: object) -> Prepared:
    """Prepare the backend in the engine's process."""
    return Prepared("fake", lambda: FakeBackend())


def load(replicas: Any) -> LoadedModel:
    builder = PromptBuilder(None, replicas.wait_ready(), RequestLimits())
    return LoadedModel(replicas, ModelPrompts(builder), replicas.wait_ended, config=replicas.config)


def main() -> int:
    served = ServedConfig("fake", ModelConfig(), directory=Path("/nowhere"))
    config = ServerConfig(port=0, log_requests=False)
    (made,) = start_models([served], EngineConfig(), "support.fake_server:prepare")
    with closing(made) as replicas:
        models = [(ServedModel("fake"), partial(load, replicas))]
        return serve(models, config, ApiKeys([]), lambda at: print(f"ready on http://{at} "))


if __name__ == "__main__":
    sys.exit(main())
