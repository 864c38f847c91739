"""The composition root of `gpuscore serve`: loads a model and serves it."""

import json
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.hub import model_directory
from gpuscore.log import LogWriter
from gpuscore.prompts.chat import ChatTemplate
from gpuscore.prompts.decisions import DecisionPrompts
from gpuscore.prompts.discovery import find_family
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import PromptFamily
from gpuscore.prompts.files import ClassifierHead, read_classifier_head
from gpuscore.prompts.rendering import TemplateLimit
from gpuscore.server.api.auth import KeyReader, read_api_keys
from gpuscore.server.api.cors import read_origins
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.server.run import serve
from gpuscore.server.service import LoadedModel
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.text.tokenizer_info import TokenizerInfo, read_tokenizer_info
from gpuscore.worker.client import EngineClient
from gpuscore.worker.messages import Start
from gpuscore.worker.process import command

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
    if server.api_key_file is not None:
        signal.signal(signal.SIGHUP, KeyReader(server, keys).start)
    tracer = read_tracer(server, os.environ)
    directory = model_directory(model.model, model.revision)
    names = (server.served_model_name or model.model, model.model)
    client = EngineClient(command(), Start(str(directory), model, engine))
    # Not by print: a missing or slow reader, or a full disk, must not end or delay the server.
    with LogWriter(STANDARD_OUTPUT) as output, closing(client):
        files = read_model_files(directory, server.family, names)  # while the child imports torch

        def announce(address: str) -> None:
            example = _example(address, client.wait_ready().classes)
            _say(output, f"gpuscore: ready on http://{address} - try\n\n{example}\n")

        _say(output, f"gpuscore: loading {model.model} as {client.wait_planned()}")
        load = partial(load_model, client, files, limits)
        return serve(names, server, keys, load, announce, tracer)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a model's directory that the server itself needs."""

    encoder: TextEncoder | None
    specials: list[str]
    head: ClassifierHead | None
    template: ChatTemplate | None
    info: TokenizerInfo | None
    family: PromptFamily | None


def read_model_files(directory: Path, family: str, names: tuple[str, ...]) -> ModelFiles:
    """Read a model's directory, with the prompt family by its name or one of the model's.

    Raises:
        ConfigError: a file cannot be used.
    """
    encoder = TextEncoder.read(directory)
    specials = [] if encoder is None else encoder.specials
    head, template = read_classifier_head(directory), ChatTemplate.read(directory)
    chat = None if template is None else template.text
    info = None if encoder is None else read_tokenizer_info(directory, encoder, chat)
    found = find_family(family, directory, reversed(names), specials, head)
    return ModelFiles(encoder, specials, head, template, info, found)


def load_model(client: EngineClient, files: ModelFiles, limits: RequestLimits) -> LoadedModel:
    """Wait for the engine and prepare the model's prompts; runs in a thread."""
    builder = PromptBuilder(files.encoder, client.wait_ready(), limits)
    prompts = None if files.family is None else FamilyPrompts(files.family, builder)
    try:
        decisions: DecisionPrompts | str = DecisionPrompts(files.template, files.specials, builder)
    except TemplateLimit:
        raise
    except ConfigError as error:
        decisions = str(error)  # part of the error that callers get
    about = client.wait_planned()
    ended = client.wait_ended
    return LoadedModel(client, builder, ended, prompts, files.head, about, decisions, files.info)


def _say(output: LogWriter, text: str) -> None:
    output.write(f"{text}\n".encode())


def _example(address: str, classes: Sequence[str] | None) -> str:
    body = {
        "query": "query: a blue wooden chair for the garden\nitem: ",
        "items": ["A wooden garden chair in blue.", "A red steel lamp.", "A blue wool scarf."],
        "labels": ["yes", "no"] if classes is None else classes[:2],
        "apply_softmax": True,
    }
    return (
        f"curl -s http://{address}/v1/score -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
