"""The composition root of `gpuscore serve`: loads models and serves them."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.options import changed
from gpuscore.config.served import ServedConfig, served_models
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from gpuscore.processes.announcement import LoadingBar, announcement
from gpuscore.processes.fronts.front import FrontApp
from gpuscore.processes.fronts.parent import Fronts, FrontSetup
from gpuscore.processes.replicas.placement import Sought, placements, places_of_all
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.replicas.start import AllReplicas, start_models
from gpuscore.processes.worker.process import EngineListener
from gpuscore.prompts.model import ModelFiles
from gpuscore.server.http.aliases import read_aliases
from gpuscore.server.http.auth import ApiKeys, KeyReader, read_api_keys
from gpuscore.server.http.descriptors import raise_limit, warn_of_limit
from gpuscore.server.http.headers import read_hosts, read_origins
from gpuscore.server.observe.tracing import check_traces, read_tracer
from gpuscore.server.run import serve
from gpuscore.system.log import LogFormat, LogWriter, chosen_format, logging_to
from gpuscore.text.tokenizer_info import TokenizerInfo, read_tokenizer_info

if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer

STANDARD_OUTPUT = 1


def serve_model(
    model: ModelConfig, server: ServerConfig, limits: RequestLimits, engine: EngineConfig
) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        ConfigError: a model cannot be served, or a setting is invalid. Keys, origins, aliases of
            paths and traces are checked before anything is loaded.
        EngineFailed: an engine was lost at start, or all of them too often since.
    """
    keys = read_api_keys(server)
    read_origins(server)
    read_hosts(server, server.host, len(keys))
    read_aliases(server)
    check_traces(server, os.environ)
    raise_limit(server.max_connections)  # the processes started below inherit it
    chosen = served_models(model, server)
    several = server.http_workers > 1
    if several and sys.platform != "linux":
        raise ConfigError("--http-workers over 1 needs Linux, whose kernel shares out connections")
    places = placements(chosen[0].config, engine.devices) if several else []
    devices = tuple(place.device for place in places)
    setup = FrontSetup(server.http_workers, [len(devices)] * len(chosen)) if several else None
    style = chosen_format(server.log_format)
    prepare = partial(_prepared, chosen, server, limits, engine, keys, devices, os.getpid())
    with ExitStack() as ending:
        forker = None
        if setup is not None:  # before this process has threads
            forker = ending.enter_context(closing(setup.forker(prepare)))
        if server.api_key_file is not None:
            signal.signal(signal.SIGHUP, KeyReader(server, keys).start)
        tracer = None if several else read_tracer(server, os.environ)
        directories = [
            model_directory(entry.config.model, entry.config.revision) for entry in chosen
        ]
        text = json.dumps(list(map(str, directories)))
        if forker is not None:
            forker.prepare(text)  # while the engines import torch
        listeners = None if setup is None else setup.listeners
        replicas = _start(chosen, directories, engine, listeners, style)
        # Not by print: a missing or slow reader, or a full disk, must not end or delay the server.
        output = ending.enter_context(LogWriter(STANDARD_OUTPUT, for_people=True))
        ending.enter_context(closing(replicas))
        say = partial(_say, output)
        if setup is None or forker is None:
            return _serve_here(prepare(text), replicas, say, tracer)
        forker.prepared()
        for number in range(len(chosen)):
            _say_loading(say, replicas, number)
        announce = _announced_by(LoadingBar(replicas.engines), say)
        with LogWriter() as log, logging_to(log, style):
            warn_of_limit(server.max_connections)
            return Fronts(setup, forker, server, keys, replicas, announce, say).run()


def _serve_here(
    app: FrontApp,
    replicas: AllReplicas,
    say: Callable[[str], None],
    tracer: "SpanTracer | None",
) -> int:
    """Serve in this process."""
    _say_loading(say, replicas, 0)  # before connections are accepted: it may be refused

    def load(number: int) -> LoadedModel:  # in a thread
        if number:
            _say_loading(say, replicas, number)
        with replicas.named(number):
            return app.models[number][1](replicas.models[number])

    models = [(served, partial(load, number)) for number, (served, _) in enumerate(app.models)]
    announce = _announced_by(
        LoadingBar(replicas.engines), lambda address: say(app.ready_lines(address))
    )
    return serve(models, app.config, app.keys, announce, tracer, say=say)


def _prepared(
    chosen: Sequence[ServedConfig],
    server: ServerConfig,
    limits: RequestLimits,
    engine: EngineConfig,
    keys: ApiKeys,
    devices: tuple[str, ...],
    pid: int,
    text: str,
) -> FrontApp:
    """Read the files of the models, whose directories are `text`; `pid` is the process to stop."""
    directories = [Path(directory) for directory in json.loads(text)]
    models = []
    for model, directory in zip(chosen, directories, strict=True):
        files = read_files(directory, server.family, model.sources)
        served = ServedModel(model.name, model.others, model.is_default, model.aliases)
        models.append(
            (served, partial(load_model, files, limits, settings=changed(model.config, engine)))
        )

    def lines(address: str) -> str:
        ready = [
            (directory, served.name, served.loaded)
            for directory, (served, _) in zip(directories, models, strict=True)
            if served.loaded is not None
        ]
        return announcement(address, ready, len(keys), pid, server.ui)

    tracer = partial(read_tracer, server, os.environ)
    return FrontApp(models, devices, server, engine, keys, tracer, lines)


def _start(
    chosen: Sequence[ServedConfig],
    directories: Sequence[Path],
    engine: EngineConfig,
    listeners: Sequence[EngineListener] | None,
    log_format: LogFormat,
) -> AllReplicas:
    """Start the engines of all models, each with its share of memory and cores."""
    sought = [
        Sought(model.name, directory, model.config)
        for model, directory in zip(chosen, directories, strict=True)
    ]
    places = places_of_all(sought, engine.devices)
    models = list(zip(directories, places, strict=True))
    started = start_models(models, engine, listeners=listeners, log_format=log_format)
    return AllReplicas([model.name for model in chosen], started)


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """The contents of a model's directory that the server itself needs."""

    prompts: ModelFiles
    info: TokenizerInfo | None


def read_files(directory: Path, family: str, names: Sequence[str]) -> ServedFiles:
    """Read the files; `names` are the model's, the best one first. Raises ConfigError."""
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
    """Wait for the engines and prepare the model's prompts; runs in a thread.

    `settings` are shown by /info.
    """
    prompts = files.prompts.prompts(replicas.wait_ready(), limits)
    about, count = replicas.wait_planned(), len(replicas.engines)
    return LoadedModel(
        replicas, prompts, replicas.wait_ended, about, files.info, count, settings or {}
    )


def _say(output: LogWriter, line: str) -> None:
    output.write(f"{line}\n".encode())


def _say_loading(say: Callable[[str], None], replicas: AllReplicas, number: int) -> None:
    say(f"gpuscore: loading {replicas.names[number]} as {replicas.wait_planned(number)}")


def _announced_by(bar: LoadingBar, say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for when the server is ready, which removes the bar first."""

    def announce(text: str) -> None:
        bar.close()
        say(text)

    return announce
