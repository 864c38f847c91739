"""The composition root of `gpuscore serve`: loads models and serves them."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import ServedConfig, listed, served_models
from gpuscore.errors import ConfigError
from gpuscore.fronts.front import FrontApp, FrontModel
from gpuscore.fronts.start import FrontSetup
from gpuscore.hub import model_directory
from gpuscore.log import LogWriter, json_logging
from gpuscore.prompts.model import ModelFiles
from gpuscore.replicas.placement import placements
from gpuscore.replicas.replicas import Replicas
from gpuscore.replicas.shares import Sought, places_of_all
from gpuscore.replicas.start import start_models
from gpuscore.replicas.together import AllReplicas
from gpuscore.server.api.auth import ApiKeys, KeyReader, read_api_keys
from gpuscore.server.api.cors import read_origins
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.server.run import serve
from gpuscore.server.served import LoadedModel, ServedModel
from gpuscore.text.tokenizer_info import TokenizerInfo, read_tokenizer_info
from gpuscore.worker.process import EngineListener

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
    chosen = served_models(model, server)
    if server.http_workers > 1:
        return _serve_by_fronts(chosen, server, limits, engine, keys)
    _read_keys_at_hangup(server, keys)
    tracer = read_tracer(server, os.environ)
    directories = [model_directory(one.config.model, one.config.revision) for one in chosen]
    replicas = _start(chosen, directories, engine)
    # Not by print: a missing or slow reader, or a full disk, must not end or delay the server.
    with LogWriter(STANDARD_OUTPUT) as output, closing(replicas):
        models = []
        for number, one in enumerate(chosen):  # while the children import torch
            files = read_files(directories[number], server.family, one.sources)
            say = partial(_say_loading, output, replicas, number, one.name)
            if number == 0:
                say()  # before connections are accepted: it may be refused
            load = partial(_load, replicas, number, files, limits, say if number else None)
            models.append((_served(one), load))
        announce = partial(_announce, output, chosen, replicas)
        return serve(models, server, keys, announce, tracer)


def _serve_by_fronts(
    chosen: Sequence[ServedConfig],
    server: ServerConfig,
    limits: RequestLimits,
    engine: EngineConfig,
    keys: ApiKeys,
) -> int:
    """Serve by several HTTP processes, which this process supervises beside the engines'."""
    if sys.platform != "linux":
        raise ConfigError("--http-workers over 1 needs Linux, whose kernel shares out connections")
    devices = tuple(place.device for place in placements(chosen[0].config, engine.devices))
    setup = FrontSetup(server.http_workers, [len(devices)] * len(chosen))

    def prepare(directories: str) -> FrontApp:
        models = []
        for one, directory in zip(chosen, json.loads(directories), strict=True):
            files = read_files(Path(directory), server.family, one.sources)
            models.append(FrontModel(_served(one), devices, partial(load_model, files, limits)))
        return FrontApp(models, server, engine, keys, partial(read_tracer, server, os.environ))

    with closing(setup.forker(prepare)) as forker:  # before this process has threads
        _read_keys_at_hangup(server, keys)
        directories = [model_directory(one.config.model, one.config.revision) for one in chosen]
        forker.prepare(json.dumps(list(map(str, directories))))  # while the engines import torch
        replicas = _start(chosen, directories, engine, setup.listeners)
        with LogWriter(STANDARD_OUTPUT) as output, closing(replicas):
            forker.prepared()
            for number, one in enumerate(chosen):
                _say_loading(output, replicas, number, one.name)
            announce = partial(_announce, output, chosen, replicas)
            with LogWriter() as log, json_logging(log):
                return setup.run(forker, server, keys, replicas, replicas.engines, announce)


def _start(
    chosen: Sequence[ServedConfig],
    directories: Sequence[Path],
    engine: EngineConfig,
    listeners: Sequence[EngineListener] | None = None,
) -> AllReplicas:
    """Start the engines of all models, each with its share of memory and cores."""
    sought = [
        Sought(one.name, directory, one.config)
        for one, directory in zip(chosen, directories, strict=True)
    ]
    places = places_of_all(sought, engine.devices)
    models = list(zip(directories, places, strict=True))
    names = [one.name for one in chosen]
    return AllReplicas(names, start_models(models, engine, listeners=listeners))


def _served(one: ServedConfig) -> ServedModel:
    return ServedModel(one.name, one.others, one.is_default)


def _load(
    replicas: AllReplicas,
    number: int,
    files: "ServedFiles",
    limits: RequestLimits,
    say: Callable[[], None] | None,
) -> LoadedModel:
    """Load one of the models as `load_model` does, in its thread."""
    if say is not None:
        say()
    with replicas.named(number):
        return load_model(files, limits, replicas.models[number])


def _say_loading(output: LogWriter, replicas: AllReplicas, number: int, name: str) -> None:
    _say(output, f"gpuscore: loading {name} as {replicas.wait_planned(number)}")


def _announce(
    output: LogWriter, chosen: Sequence[ServedConfig], replicas: AllReplicas, address: str
) -> None:
    first = None if len(chosen) == 1 else chosen[0].name
    example = _example(address, replicas.models[0].wait_ready().classes, first)
    models = f" with {listed([one.name for one in chosen])}" if first else ""
    _say(output, f"gpuscore: ready on http://{address}{models} - try\n\n{example}\n")


def _read_keys_at_hangup(server: ServerConfig, keys: ApiKeys) -> None:
    if server.api_key_file is not None:
        signal.signal(signal.SIGHUP, KeyReader(server, keys).start)


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


def load_model(files: ServedFiles, limits: RequestLimits, replicas: Replicas) -> LoadedModel:
    """Wait for the engines and prepare the model's prompts; runs in a thread."""
    prompts = files.prompts.prompts(replicas.wait_ready(), limits)
    return LoadedModel(replicas, prompts, replicas.wait_ended, replicas.wait_planned(), files.info)


def _say(output: LogWriter, text: str) -> None:
    output.write(f"{text}\n".encode())


def _example(address: str, classes: Sequence[str] | None, model: str | None) -> str:
    body = ({} if model is None else {"model": model}) | {
        "query": "query: a blue wooden chair for the garden\nitem: ",
        "items": ["A wooden garden chair in blue.", "A red steel lamp.", "A blue wool scarf."],
        "labels": ["yes", "no"] if classes is None else classes[:2],
        "apply_softmax": True,
    }
    return (
        f"curl -s http://{address}/v1/score -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
