"""Which family a model directory is of; decided once, when the model is loaded.

In this order: `--family`, what sentence-transformers has written beside the weights, what the
model's configuration says, the model's name. Nothing is guessed: without any of them `/rerank` is
refused with the reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.families.chat import ChatTemplate, Messages, parts_of
from gpuscore.families.family import DOCUMENT, INSTRUCTION, ONLY_CLASS, QUERY, Family, literal
from gpuscore.families.files import Head, read_architecture, read_json
from gpuscore.families.registry import FAMILIES, QWEN3_RERANKER, AnyFamily, by_name

LOGIT_SCORE = "LogitScore"


def find_family(
    wanted: str,
    directory: Path,
    names: Iterable[str],
    specials: Sequence[str],
    head: Head | None = None,
) -> Family | None:
    """The model's family; None where nothing says that it is of one.

    Args:
        wanted: "auto", "none", or a name of the registry.
        directory: the model's.
        names: what the model is called.
        specials: its tokenizer's special tokens, as text.
        head: of a classifier.

    Raises:
        ConfigError: files that contradict themselves or hold what is not supported.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        return _for_head(_resolved(FAMILIES[wanted], directory, specials), head)
    found = _sentence_transformers(directory, specials)
    if found is None:
        known = _configured(directory) or by_name(names, read_architecture(directory))
        found = None if known is None else _resolved(known, directory, specials)
    if found is None or (head is not None and head.num_classes > 1):
        return None  # of several classes nobody says which one means relevant
    return _for_head(found, head)


def _for_head(family: Family, head: Head | None) -> Family:
    """The same prompt read by another head: a conversion keeps the one and replaces the other."""
    if head is None:
        if ONLY_CLASS in family.labels:
            raise ConfigError(
                f"models of the family {family.name} have a head of one class; this one has a "
                "vocabulary"
            )
        return family
    if head.num_classes != 1:
        raise ConfigError(
            f"--family {family.name}: the model has {head.num_classes} classes; supported: one"
        )
    return replace(family, labels=(ONLY_CLASS,), classes=())


def _resolved(family: AnyFamily, directory: Path, specials: Sequence[str]) -> Family:
    if isinstance(family, Family):
        return family
    template = ChatTemplate.read(directory)
    if template is None:
        raise ConfigError(
            f"prompts of the family {family.name} are made by the model's chat template, and "
            f"{directory} has none; --family none serves /v1/score without it"
        )

    def parts(messages: Messages) -> tuple[str, ...]:
        made = parts_of(template.marked(messages, family.options), specials)
        # The beginning of the answer is what the model would have said: tokens of its own.
        return (*made, literal(family.answer)) if family.answer else made

    return Family(
        name=family.name,
        source=family.source,
        parts=parts(family.messages),
        labels=family.labels,
        classes=family.classes,
        answering_parts=parts(family.answering) if family.answering else (),
        first_tokens=bool(family.classes),
        instruction=family.instruction,
        activation=family.activation,
        strip=True,  # many templates do that, so all do it
    )


def _configured(directory: Path) -> Family | None:
    """From config.json, as vLLM's users write it there."""
    config = read_json(directory / "config.json") or {}
    return QWEN3_RERANKER if config.get("is_original_qwen3_reranker") is True else None


def _sentence_transformers(directory: Path, specials: Sequence[str]) -> Family | None:
    """From modules.json, the module that reads the logits, and the chat template."""
    modules = read_json(directory / "modules.json")
    if modules is None:
        return None
    paths = [m["path"] for m in modules if str(m.get("type", "")).endswith("." + LOGIT_SCORE)]
    if not paths:
        return None
    score = read_json(directory / paths[0] / "config.json")
    if score is None:
        raise ConfigError(f"{directory / paths[0] / 'config.json'} is missing")
    template = ChatTemplate.read(directory)
    if template is None:
        raise ConfigError(f"{directory} has a {LOGIT_SCORE} module but no chat template")
    options = read_json(directory / "sentence_bert_config.json") or {}
    settings = read_json(directory / "config_sentence_transformers.json") or {}
    prompts, name = settings.get("prompts") or {}, settings.get("default_prompt_name")
    instruction = prompts.get(name, "") if name is not None else ""
    given = options.get("processing_kwargs", {}).get("chat_template", {})
    text, strip = _rendered(template, bool(instruction), given)
    negative = score.get("false_token_id")
    return Family(
        name=f"sentence-transformers {directory.name}",
        source=str(directory / "modules.json"),
        parts=parts_of(text, specials),
        labels=(score["true_token_id"], *(() if negative is None else (negative,))),
        instruction=instruction,
        strip=strip,
    )


def _rendered(
    template: ChatTemplate, with_instruction: bool, options: dict[str, Any]
) -> tuple[str, bool]:
    """The prompt with marks for the texts, and whether white space around those is dropped."""
    system = [("system", "{" + INSTRUCTION + "}")] if with_instruction else []
    messages = [*system, (QUERY, "{" + QUERY + "}"), (DOCUMENT, "{" + DOCUMENT + "}")]
    bare, spaced = (template.marked(messages, options, around) for around in ("", " "))
    return bare, spaced == bare
