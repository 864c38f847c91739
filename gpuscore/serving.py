"""The composition root of `gpuscore serve`: loads a model and serves it."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuscore.announcement import ServedAs, announcement
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.fronts.front import FrontApp
from gpuscore.fronts.start import FrontSetup
from gpuscore.hub import model_directory
from gpuscore.loading_bar import LoadingBar
from gpuscore.log import LogWriter, chosen_format, logging_to
from gpuscore.prompts.model import ModelFiles
from gpuscore.replicas.placement import placements
from gpuscore.replicas.replicas import Replicas
from gpuscore.replicas.start import start_replicas
from gpuscore.server.api.auth import ApiKeys, KeyReader, read_api_keys
from gpuscore.server.api.cors import read_origins
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.server.run import serve
from gpuscore.server.service import LoadedModel
from gpuscore.text.tokenizer_info import TokenizerInfo, read_tokenizer_info

STANDARD_OUTPUT = 1


def serve_model(
    model: ModelConfig, server: ServerConfig, limits: RequestLimits, engine: EngineConfig
) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        ConfigError: the model cannot be served, or a setting is invalid. Keys and origins are
            checked before anything is loaded.
        EngineFailed: the engine was lost at start, or too often since.
    """
    keys = read_api_keys(server)
    read_origins(server)
    names = (server.served_model_name or model.model, model.model)
    if server.http_workers > 1:
        return _serve_by_fronts(names, model, server, limits, engine, keys)
    _read_keys_at_hangup(server, keys)
    tracer = read_tracer(server, os.environ)
    directory = model_directory(model.model, model.revision)
    style = chosen_format(server.log_format)
    replicas = start_replicas(directory, model, engine, log_format=style)
    # Not by print: a missing or slow reader, or a full disk, must not end or delay the server.
    with LogWriter(STANDARD_OUTPUT, for_people=True) as output, closing(replicas):
        say = partial(_say, output)
        files = read_files(directory, server.family, names)  # while the children import torch
        say(f"gpuscore: loading {model.model} as {replicas.wait_planned()}")
        bar = LoadingBar(replicas.engines)
        lines = ReadyLines(ServedAs(directory, names[0], os.getpid()), keys)
        load = partial(lines.loaded, partial(load_model, files, limits), replicas)

        def announce(address: str) -> None:
            bar.close()
            say(lines.text(address))

        return serve(names, server, keys, load, announce, tracer, say=say)


def _serve_by_fronts(
    names: tuple[str, str],
    model: ModelConfig,
    server: ServerConfig,
    limits: RequestLimits,
    engine: EngineConfig,
    keys: ApiKeys,
) -> int:
    """Serve by several HTTP processes, which this process supervises beside the engines'."""
    if sys.platform != "linux":
        raise ConfigError("--http-workers over 1 needs Linux, whose kernel shares out connections")
    devices = tuple(place.device for place in placements(model, engine.devices))
    setup = FrontSetup(server.http_workers, len(devices))
    parent = os.getpid()

    def prepare(directory: str) -> FrontApp:
        files = read_files(Path(directory), server.family, names)
        tracer = partial(read_tracer, server, os.environ)
        lines = ReadyLines(ServedAs(Path(directory), names[0], parent), keys)
        load = partial(lines.loaded, partial(load_model, files, limits))
        return FrontApp(names, server, engine, keys, devices, load, tracer, lines.text)

    with closing(setup.forker(prepare)) as forker:  # before this process has threads
        _read_keys_at_hangup(server, keys)
        directory = model_directory(model.model, model.revision)
        forker.prepare(str(directory))  # while the engines' processes import torch
        style = chosen_format(server.log_format)
        replicas = start_replicas(
            directory, model, engine, listeners=setup.listeners, log_format=style
        )
        with LogWriter(STANDARD_OUTPUT, for_people=True) as output, closing(replicas):
            say = partial(_say, output)
            forker.prepared()
            say(f"gpuscore: loading {model.model} as {replicas.wait_planned()}")
            bar = LoadingBar(replicas.engines)

            def announce(text: str) -> None:
                bar.close()
                say(text)

            with LogWriter() as log, logging_to(log, style):
                return setup.run(forker, server, keys, replicas, replicas.engines, announce, say)


class ReadyLines:
    """The lines that are printed when the server is ready, made once its model is loaded."""

    def __init__(self, served: ServedAs, keys: ApiKeys) -> None:
        self._served, self._keys = served, keys
        self._model: LoadedModel | None = None

    def loaded(self, load: Callable[[Replicas], LoadedModel], replicas: Replicas) -> LoadedModel:
        """Load the model and keep it."""
        self._model = load(replicas)
        return self._model

    def text(self, address: str) -> str:
        assert self._model is not None  # noqa: S101  (called after the load)
        return announcement(address, self._served, self._model, len(self._keys))


def _read_keys_at_hangup(server: ServerConfig, keys: ApiKeys) -> None:
    if server.api_key_file is not None:
        signal.signal(signal.SIGHUP, KeyReader(server, keys).start)


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """The contents of a model's directory that the server itself needs."""

    prompts: ModelFiles
    info: TokenizerInfo | None


def read_files(directory: Path, family: str, names: tuple[str, ...]) -> ServedFiles:
    prompts = ModelFiles.read(directory, family, reversed(names))
    chat = None if prompts.template is None else prompts.template.text
    encoder = prompts.encoder
    info = None if encoder is None else read_tokenizer_info(directory, encoder, chat)
    return ServedFiles(prompts, info)


def load_model(files: ServedFiles, limits: RequestLimits, replicas: Replicas) -> LoadedModel:
    """Wait for the engines and prepare the model's prompts; runs in a thread."""
    prompts = files.prompts.prompts(replicas.wait_ready(), limits)
    return LoadedModel(
        replicas,
        prompts.builder,
        replicas.wait_ended,
        prompts.family,
        prompts.head,
        replicas.wait_planned(),
        prompts.decisions,
        files.info,
    )


def _say(output: LogWriter, text: str) -> None:
    output.write(f"{text}\n".encode())
