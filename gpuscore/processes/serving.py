"""The main function of `gpuscore serve`: starts engine processes, loads models, serves HTTP."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.options import changed
from gpuscore.config.served import ServedConfig, served_models
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.errors import ConfigError, EngineFailed
from gpuscore.processes.announcement import announcement
from gpuscore.processes.replicas.replicas import Replicas, start_models
from gpuscore.prompts.model import ModelFiles
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.headers import read_api_keys, read_hosts
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.server.run import serve
from gpuscore.system.log import LogWriter
from gpuscore.text.tokenizer_info import TokenizerInfo, read_tokenizer_info

STANDARD_OUTPUT = 1


def serve_model(
    model: ModelConfig, server: ServerConfig, limits: RequestLimits, engine: EngineConfig
) -> int:
    """Serve until a signal ends the server; return the exit code.

    Raises:
        ConfigError: a model cannot be served, or a setting is invalid. Settings of keys, hosts,
            path aliases and tracing are checked before anything is loaded.
        EngineFailed: an engine process failed at start, or all of them failed too often later.
    """
    keys = read_api_keys(server)
    read_hosts(server, len(keys))
    read_aliases(server)
    tracer = read_tracer(os.environ)
    chosen = served_models(model, server)
    with ExitStack() as exit_stack:
        if server.api_key_file is not None:
            signal.signal(signal.SIGHUP, lambda *_: keys.start_reading(server))
        chosen = [entry.located() for entry in chosen]
        replicas = start_models(chosen, engine)
        # `print` would let a full disk, or a missing or slow reader, stop or delay the server.
        output = exit_stack.enter_context(LogWriter(STANDARD_OUTPUT))
        for engines in replicas:
            exit_stack.callback(engines.close)

        def say(line: str) -> None:
            output.write(f"{line}\n".encode())

        models = [  # read here while the engine processes import torch
            (
                ServedModel(entry.name, entry.others),
                read_files(entry.directory, server.family, entry.sources),
                changed(entry.config, engine),
            )
            for entry in chosen
        ]

        def load(number: int) -> LoadedModel:  # runs in a thread
            _, files, settings = models[number]
            say(f"gpuscore: loading {chosen[number].name}")
            with _model_named_in_errors(chosen, number):
                return load_model(files, limits, replicas[number], settings)

        def announce(address: str) -> None:
            ready = [
                (entry.directory, served.name, served.loaded)
                for entry, (served, _, _) in zip(chosen, models, strict=True)
                if served.loaded is not None
            ]
            say(announcement(address, ready, len(keys), os.getpid(), ui=server.ui))

        loads = [(served, partial(load, number)) for number, (served, _, _) in enumerate(models)]
        return serve(loads, server, keys, announce, tracer=tracer, say=say)


@contextmanager
def _model_named_in_errors(chosen: Sequence[ServedConfig], number: int) -> Iterator[None]:
    """Put the model's name before the text of an error, if there are several models."""
    try:
        yield
    except (ConfigError, EngineFailed) as error:
        if len(chosen) == 1:
            raise
        raise type(error)(f"--model {chosen[number].name}: {error}") from error


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """What the API server itself needs of a model's directory."""

    prompts: ModelFiles
    info: TokenizerInfo | None


def read_files(directory: Path, family: str, names: Sequence[str]) -> ServedFiles:
    """Read the files; `names` are the model's names, the best one first.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    prompts = ModelFiles.read(directory, family, names)
    chat = None if prompts.template is None else prompts.template.text
    encoder = prompts.encoder
    info = None if encoder is None else read_tokenizer_info(directory, encoder, chat)
    return ServedFiles(prompts, info)


def load_model(
    files: ServedFiles,
    limits: RequestLimits,
    replicas: Replicas,
    settings: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Wait for the engine processes, then prepare the model's prompts.

    It runs in a thread. /info shows `settings`.
    """
    prompts = files.prompts.prompts(replicas.wait_ready(), limits)
    return LoadedModel(
        replicas,
        prompts,
        replicas.wait_ended,
        about=replicas.about,
        tokenizer_info=files.info,
        replicas=len(replicas.engines),
        settings=settings or {},
        config=replicas.config,
    )
