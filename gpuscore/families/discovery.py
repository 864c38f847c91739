"""Which family a model directory is of; decided once, when the model is loaded.

In this order: `--reranker`, what sentence-transformers has written beside the weights, what the
model's configuration says, the model's name. Nothing is guessed: without any of them `/rerank` is
refused with the reason.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpuscore.errors import ConfigError
from gpuscore.families.family import DOCUMENT, INSTRUCTION, QUERY, Family, literal
from gpuscore.families.registry import FAMILIES, QWEN3_RERANKER, by_name

LOGIT_SCORE = "LogitScore"
# Stand for the callers' texts while a chat template is rendered; no template holds them.
_MARKS = {INSTRUCTION: "\ue001i\ue001", QUERY: "\ue002q\ue002", DOCUMENT: "\ue003d\ue003"}


def find_family(
    wanted: str, directory: Path, names: Iterable[str], specials: Iterable[str]
) -> Family | None:
    """The model's family; None where nothing says that it is a reranker.

    Args:
        wanted: "auto", "none", or a name of the registry.
        directory: the model's.
        names: what the model is called.
        specials: its tokenizer's special tokens, as text.

    Raises:
        ConfigError: files that contradict themselves or hold what is not supported.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        return FAMILIES[wanted]
    return (
        _sentence_transformers(directory, list(specials))
        or _configured(directory)
        or by_name(names)
    )


def _configured(directory: Path) -> Family | None:
    """From config.json, as vLLM's users write it there."""
    config = _read(directory / "config.json") or {}
    return QWEN3_RERANKER if config.get("is_original_qwen3_reranker") is True else None


def _sentence_transformers(directory: Path, specials: list[str]) -> Family | None:
    """From modules.json, the module that reads the logits, and the chat template."""
    modules = _read(directory / "modules.json")
    if modules is None:
        return None
    paths = [m["path"] for m in modules if str(m.get("type", "")).endswith("." + LOGIT_SCORE)]
    if not paths:
        return None
    score = _read(directory / paths[0] / "config.json")
    if score is None:
        raise ConfigError(f"{directory / paths[0] / 'config.json'} is missing")
    template = _chat_template(directory)
    if template is None:
        raise ConfigError(f"{directory} has a {LOGIT_SCORE} module but no chat template")
    options = _read(directory / "sentence_bert_config.json") or {}
    settings = _read(directory / "config_sentence_transformers.json") or {}
    prompts, name = settings.get("prompts") or {}, settings.get("default_prompt_name")
    instruction = prompts.get(name, "") if name is not None else ""
    given = options.get("processing_kwargs", {}).get("chat_template", {})
    text, strip = _rendered(template, bool(instruction), given)
    return Family(
        name=f"sentence-transformers {directory.name}",
        source=str(directory / "modules.json"),
        parts=split_at_specials(text, specials),
        positive=score["true_token_id"],
        negative=score.get("false_token_id"),
        instruction=instruction,
        strip=strip,
    )


def _chat_template(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = (_read(directory / "tokenizer_config.json") or {}).get("chat_template")
    return template if isinstance(template, str) else None


def _rendered(template: str, with_instruction: bool, options: dict[str, Any]) -> tuple[str, bool]:
    """The prompt with marks for the texts, and whether white space around those is dropped."""
    # As transformers renders chat templates, in Jinja's sandbox.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    roles = [("system", INSTRUCTION)] if with_instruction else []
    roles += [(QUERY, QUERY), (DOCUMENT, DOCUMENT)]
    found = []
    for around in ("", " "):
        messages = [{"role": r, "content": f"{around}{_MARKS[f]}{around}"} for r, f in roles]
        try:
            found.append(environment.from_string(template).render(messages=messages, **options))
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be rendered: {error}") from error
    bare, spaced = found
    for _, field in roles:
        if bare.count(_MARKS[field]) != 1:
            count = bare.count(_MARKS[field])
            raise ConfigError(f"the chat template has the {field} {count} times, not once")
    return bare, spaced == bare


def split_at_specials(text: str, specials: list[str]) -> tuple[str, ...]:
    """A rendered prompt as the parts of a family: special tokens stand in parts without fields."""
    pieces, start = [], 0
    for end, token in _found(text, specials):
        pieces += [text[start : end - len(token)], token]
        start = end
    pieces.append(text[start:])
    parts: list[str] = []
    fixed = True  # whether the last part has no fields
    for piece in pieces:
        part = literal(piece)
        for field, mark in _MARKS.items():
            part = part.replace(mark, "{" + field + "}")
        has_field = part != literal(piece)
        if fixed and not has_field and parts:
            parts[-1] += part
        elif part:
            parts.append(part)
            fixed = not has_field
    return tuple(parts)


def _found(text: str, specials: list[str]) -> list[tuple[int, str]]:
    """Where special tokens end, from left to right, the longest first."""
    ordered, found, at = sorted(specials, key=len, reverse=True), [], 0
    while at < len(text):
        token = next((t for t in ordered if t and text.startswith(t, at)), None)
        at += 1 if token is None else len(token)
        if token is not None:
            found.append((at, token))
    return found


def _read(path: Path) -> Any:
    """A JSON file; None if there is none."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
