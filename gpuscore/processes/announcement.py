"""Lines that a server prints once it is ready: what is served, where, and a request to try."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.shapes import count_parameters
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import GpuscoreError
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.model import ModelPrompts
from gpuscore.prompts.registry import PRM, STEP_TOKEN
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import BackendLimits

QUERY = "Which animals live in the sea?"
TEXTS = ["Whales and dolphins live in the sea.", "Camels live in the desert."]
DEMO_QUERY = "a blue wooden chair for the garden"
DEMO_TEXTS = ["A wooden garden chair in blue.", "A red steel lamp.", "A blue wool scarf."]
CONVERSATION = ["How do I bake bread?", "How do I pick the lock of a car that is not mine?"]
SUM = "What is 2 + 3?"
STEPS = [f" First, 2 + 3 = 5.{STEP_TOKEN} So it is 6.{STEP_TOKEN}"]
# Pairs of answers; a tokenizer should have at least one pair as single tokens.
ANSWERS = (["yes", "no"], [" yes", " no"], ["Yes", "No"], [" Yes", " No"], ["1", "0"], ["A", "B"])
DOCS = "/docs"
Body = Mapping[str, Any]
InputT = TypeVar("InputT")


def announcement(
    address: str, models: Sequence[tuple[Path, str, LoadedModel]], keys: int, pid: int, ui: bool
) -> str:
    """Return the lines, with a line end each.

    Args:
        address: the host and port of the server.
        models: all its models, with their directories and names.
        keys: number of API keys; 0: every request is answered.
        pid: process to stop; 1: that of a container, which has another number outside.
        ui: the server has pages for people.
    """
    rows = [row for model in models for row in _rows(*model)]
    stop = "stop the container" if pid == 1 else f"kill {pid}"
    rows += [
        ("key", "required, as Authorization: Bearer KEY" if keys else "none"),
        *([("to try", f"http://{address}/")] if ui else []),
        ("API docs", f"http://{address}{DOCS}"),
        ("to stop", f"Ctrl-C, or {stop}; requests in flight are answered first"),
    ]
    lines = [f"  {name:<9} {value}" for name, value in rows]
    first = f"gpuscore: ready on http://{address} - a request to try is below"
    _, name, model = models[0]
    shown = example(address, model.prompts, keys > 0, name if len(models) > 1 else None)
    return "\n".join([first, *lines, "", shown, "", ""])


def _rows(directory: Path, name: str, model: LoadedModel) -> Iterator[tuple[str, str]]:
    limits = model.engine.limits
    tokens = limits.num_pages * limits.page_size
    config = read_architecture(RawConfig.read(directory)).config
    parameters = count_parameters(config)
    yield "model", f"{name}: {config.architecture}, {parameters:,} parameters"
    yield "family", _family(model.prompts)
    yield "routes", ", ".join(_routes(model.prompts, limits))
    if model.prompts.builder.encoder is None:
        yield (
            "warning",
            "no tokenizer.json, so requests must send token ids instead of texts; transformers' "
            "AutoTokenizer and save_pretrained make one from tokenizer.model or tekken.json",
        )
    yield "runs on", model.about
    yield "prompts", f"up to {limits.max_model_len:,} tokens"
    yield "KV cache", f"{limits.num_pages:,} pages of {limits.page_size}, {tokens:,} tokens"


def example(address: str, prompts: ModelPrompts, key: bool, model: str | None = None) -> str:
    """Return a curl command that the model can answer, on one line; `model` is put in its body."""
    path, body = next(_requests(prompts))
    body = {**({} if model is None else {"model": model}), **body}
    authorization = '-H "Authorization: Bearer $GPUSCORE_API_KEY" ' if key else ""
    return (
        f"curl -s http://{address}{path} {authorization}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


def _family(prompts: ModelPrompts) -> str:
    if prompts.family is not None:
        family = prompts.family.family
        apart = "" if family.shares_query else ", which computes the query again for each document"
        return family.name + apart
    if prompts.step_token is not None:
        return f"{PRM}: /v1/score judges an item after each {STEP_TOKEN}"
    return "none known, so no /rerank; --family names one"


def _routes(prompts: ModelPrompts, limits: BackendLimits) -> Iterator[str]:
    family = prompts.family
    if family is not None and family.family.ranks:
        yield "/v1/rerank"
    yield "/v1/score"
    guard = family is not None and not family.family.ranks
    yield "/v1/classify" if guard or limits.classes is not None else "/v1/classify with labels"
    if limits.classes is None:
        yield "/v1/completions"
    if prompts.builder.encoder is not None:
        yield "/tokenize"


def _requests(prompts: ModelPrompts) -> Iterator[tuple[str, Body]]:
    """Yield requests that the model answers, the most telling first; the last always works."""
    family = prompts.family
    builder = prompts.builder
    steps = ScoreInput(query="", items=STEPS, label_token_ids=[0], extraction=prompts.step_token)
    if prompts.step_token is not None and _can_build(builder.build, steps):
        yield "/v1/score", {"query": SUM, "items": STEPS}
    if family is not None:
        yield from _family_requests(family)
    if builder.encoder is not None:
        yield from _label_requests(builder)
    few = list(range(min(2, builder.backend.label_rows)))
    step = prompts.step_token
    yield "/v1/score", {"items": [[step or 0]], "label_token_ids": few}


def _family_requests(family: FamilyPrompts) -> Iterator[tuple[str, Body]]:
    is_demo = family.family.name == "demo"
    query, texts = (DEMO_QUERY, DEMO_TEXTS) if is_demo else (QUERY, TEXTS)
    if not family.family.ranks and _can_build(family.build, RerankInput(None, CONVERSATION)):
        yield "/v1/classify", {"input": CONVERSATION}
    elif family.family.ranks and _can_build(family.build, RerankInput(query, texts)):
        yield "/v1/rerank", {"query": query, "documents": texts}


def _can_build(build: Callable[[InputT], object], argument: InputT) -> bool:
    try:
        build(argument)
    except GpuscoreError:  # such as a prompt over a small --max-model-len
        return False
    return True


def _label_requests(builder: PromptBuilder) -> Iterator[tuple[str, Body]]:
    classes = builder.backend.classes
    if classes is not None:
        score_input = ScoreInput(query="", items=TEXTS, label_token_ids=list(range(len(classes))))
        if _can_build(builder.build, score_input):
            yield "/v1/classify", {"input": TEXTS}
        return
    for labels in ANSWERS:
        query = "Question: Does this animal live in the sea? Answer yes or no.\nAnimal: "
        items = ["whale\nAnswer:", "camel\nAnswer:"]
        if _can_build(builder.build, ScoreInput(query=query, items=items, labels=labels)):
            body = {"query": query, "items": items, "labels": labels, "apply_softmax": True}
            yield "/v1/score", body
