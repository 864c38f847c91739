"""The composition root of `gpuscore serve`: loads models and serves them."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import ServedConfig, served_models
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from gpuscore.processes.announcement import ServedAs, announcement
from gpuscore.processes.fronts.front import FrontApp, FrontModel
from gpuscore.processes.fronts.start import FrontSetup
from gpuscore.processes.loading_bar import LoadingBar
from gpuscore.processes.replicas.placement import placements
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.replicas.shares import Sought, places_of_all
from gpuscore.processes.replicas.start import start_models
from gpuscore.processes.replicas.together import AllReplicas
from gpuscore.processes.worker.process import EngineListener
from gpuscore.prompts.decisions import Asking, read_asking
from gpuscore.prompts.model import ModelFiles
from gpuscore.server.http.auth import ApiKeys, KeyReader, read_api_keys
from gpuscore.server.http.cors import read_origins
from gpuscore.server.http.descriptors import raise_limit, warn_of_limit
from gpuscore.server.http.hosts import read_hosts
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.server.run import serve
from gpuscore.system.log import LogFormat, LogWriter, chosen_format, logging_to
from gpuscore.text.tokenizer import TokenizerInfo, read_tokenizer_info

STANDARD_OUTPUT = 1


def serve_model(
    model: ModelConfig, server: ServerConfig, limits: RequestLimits, engine: EngineConfig
) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        ConfigError: a model cannot be served, or a setting is invalid. Keys and origins are
            checked before anything is loaded.
        EngineFailed: an engine was lost at start, or all of them too often since.
    """
    keys = read_api_keys(server)
    read_origins(server)
    read_hosts(server, server.host, len(keys))
    raise_limit(server.max_connections)  # the processes started below inherit it
    chosen = served_models(model, server)
    asked = asking(server)
    if server.http_workers > 1:
        return _serve_by_fronts(chosen, server, limits, engine, keys, asked)
    _read_keys_at_hangup(server, keys)
    tracer = read_tracer(server, os.environ)
    directories = [model_directory(one.config.model, one.config.revision) for one in chosen]
    style = chosen_format(server.log_format)
    replicas = _start(chosen, directories, engine, log_format=style)
    # Not by print: a missing or slow reader, or a full disk, must not end or delay the server.
    with LogWriter(STANDARD_OUTPUT, for_people=True) as output, closing(replicas):
        say, models = partial(_say, output), []
        lines = ReadyLines(chosen, directories, keys, server.ui)
        for number, one in enumerate(chosen):  # while the children import torch
            files = read_files(directories[number], server.family, one.sources, asked)
            loading = partial(_say_loading, say, replicas, number, one.name)
            if number == 0:
                loading()  # before connections are accepted: it may be refused
            prepare = partial(lines.loaded, number, partial(load_model, files, limits))
            load = partial(_load, replicas, number, prepare, loading if number else None)
            models.append((_served(one), load))
        announce = _announced_by(LoadingBar(replicas.engines), lambda at: say(lines.text(at)))
        return serve(models, server, keys, announce, tracer, say=say)


def _serve_by_fronts(
    chosen: Sequence[ServedConfig],
    server: ServerConfig,
    limits: RequestLimits,
    engine: EngineConfig,
    keys: ApiKeys,
    asked: Asking,
) -> int:
    """Serve by several HTTP processes, which this process supervises beside the engines'."""
    if sys.platform != "linux":
        raise ConfigError("--http-workers over 1 needs Linux, whose kernel shares out connections")
    devices = tuple(place.device for place in placements(chosen[0].config, engine.devices))
    setup = FrontSetup(server.http_workers, [len(devices)] * len(chosen))
    parent = os.getpid()

    def prepare(given: str) -> FrontApp:
        directories = [Path(one) for one in json.loads(given)]
        lines, models = ReadyLines(chosen, directories, keys, server.ui, parent), []
        for number, one in enumerate(chosen):
            files = read_files(directories[number], server.family, one.sources, asked)
            load = partial(lines.loaded, number, partial(load_model, files, limits))
            models.append(FrontModel(_served(one), devices, load))
        tracer = partial(read_tracer, server, os.environ)
        return FrontApp(models, server, engine, keys, tracer, lines.text)

    with closing(setup.forker(prepare)) as forker:  # before this process has threads
        _read_keys_at_hangup(server, keys)
        directories = [model_directory(one.config.model, one.config.revision) for one in chosen]
        forker.prepare(json.dumps(list(map(str, directories))))  # while the engines import torch
        style = chosen_format(server.log_format)
        replicas = _start(chosen, directories, engine, setup.listeners, style)
        with LogWriter(STANDARD_OUTPUT, for_people=True) as output, closing(replicas):
            say = partial(_say, output)
            forker.prepared()
            for number, one in enumerate(chosen):
                _say_loading(say, replicas, number, one.name)
            announce = _announced_by(LoadingBar(replicas.engines), say)
            with LogWriter() as log, logging_to(log, style):
                warn_of_limit(server.max_connections)
                return setup.run(forker, server, keys, replicas, replicas.engines, announce, say)


class ReadyLines:
    """The lines that are printed when the server is ready, made once its models are loaded.

    Args:
        chosen: the models.
        directories: theirs.
        keys: the API keys.
        ui: the server has pages for people.
        pid: of the process to stop; None = this one.
    """

    def __init__(
        self,
        chosen: Sequence[ServedConfig],
        directories: Sequence[Path],
        keys: ApiKeys,
        ui: bool,
        pid: int | None = None,
    ) -> None:
        self._served = [
            ServedAs(directory, one.name)
            for directory, one in zip(directories, chosen, strict=True)
        ]
        self._keys, self._pid, self._ui = keys, os.getpid() if pid is None else pid, ui
        self._models: dict[int, LoadedModel] = {}

    def loaded(
        self, number: int, load: Callable[[Replicas], LoadedModel], replicas: Replicas
    ) -> LoadedModel:
        """Load one of the models and keep it."""
        self._models[number] = load(replicas)
        return self._models[number]

    def text(self, address: str) -> str:
        """Return the lines; call it when all models are loaded."""
        models = [(one, self._models[number]) for number, one in enumerate(self._served)]
        return announcement(address, models, len(self._keys), self._pid, self._ui)


def _start(
    chosen: Sequence[ServedConfig],
    directories: Sequence[Path],
    engine: EngineConfig,
    listeners: Sequence[EngineListener] | None = None,
    log_format: LogFormat = "json",
) -> AllReplicas:
    """Start the engines of all models, each with its share of memory and cores."""
    sought = [
        Sought(one.name, directory, one.config)
        for one, directory in zip(chosen, directories, strict=True)
    ]
    places = places_of_all(sought, engine.devices)
    models = list(zip(directories, places, strict=True))
    names = [one.name for one in chosen]
    started = start_models(models, engine, listeners=listeners, log_format=log_format)
    return AllReplicas(names, started)


def _served(one: ServedConfig) -> ServedModel:
    return ServedModel(one.name, one.others, one.is_default, one.aliases)


def _load(
    replicas: AllReplicas,
    number: int,
    load: Callable[[Replicas], LoadedModel],
    say: Callable[[], None] | None,
) -> LoadedModel:
    """Load one of the models as `load_model` does, in its thread."""
    if say is not None:
        say()
    with replicas.named(number):
        return load(replicas.models[number])


def _say_loading(say: Callable[[str], None], replicas: AllReplicas, number: int, name: str) -> None:
    say(f"gpuscore: loading {name} as {replicas.wait_planned(number)}")


def _announced_by(bar: LoadingBar, say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for when the server is ready, which removes the bar first."""

    def announce(text: str) -> None:
        bar.close()
        say(text)

    return announce


def _read_keys_at_hangup(server: ServerConfig, keys: ApiKeys) -> None:
    if server.api_key_file is not None:
        signal.signal(signal.SIGHUP, KeyReader(server, keys).start)


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """The contents of a model's directory that the server itself needs."""

    prompts: ModelFiles
    info: TokenizerInfo | None


def asking(server: ServerConfig) -> Asking:
    """Return how typed questions are asked; raise ConfigError if the calibration is unreadable."""
    return read_asking(server.decision_order, server.calibration)


def read_files(
    directory: Path, family: str, names: Sequence[str], asked: Asking | None = None
) -> ServedFiles:
    """Read the files; `names` are the model's, the best one first. Raises ConfigError."""
    prompts = ModelFiles.read(directory, family, names, asked)
    chat = None if prompts.template is None else prompts.template.text
    encoder = prompts.encoder
    info = None if encoder is None else read_tokenizer_info(directory, encoder, chat)
    return ServedFiles(prompts, info)


def load_model(files: ServedFiles, limits: RequestLimits, replicas: Replicas) -> LoadedModel:
    """Wait for the engines and prepare the model's prompts; runs in a thread."""
    prompts = files.prompts.prompts(replicas.wait_ready(), limits)
    about, count = replicas.wait_planned(), len(replicas.engines)
    return LoadedModel(replicas, prompts, replicas.wait_ended, about, files.info, count)


def _say(output: LogWriter, text: str) -> None:
    output.write(f"{text}\n".encode())
