"""Facts of a model's files about its prompts: its classifier head, and its prompt family.

The family is found once, when the model is loaded. The sources are, in this order: `--family`, the
files of sentence-transformers beside the weights, the model's config.json, the model's name. If
no source names a family, no family is guessed, and `/rerank` is refused with the reason.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.files import (
    CLASSIFIERS,
    FROM_TOKENS,
    PROCESS_REWARD,
    architecture_name,
    as_object,
    read_json,
    read_object,
    shown,
)
from gpuscore.prompts.chat import WITHOUT_FAMILY, ChatTemplate, parts_of
from gpuscore.prompts.family import (
    DOCUMENT,
    INSTRUCTION,
    ONLY_CLASS,
    QUERY,
    Activation,
    Ends,
    Messages,
    PromptFamily,
    formula_of,
    literal,
)
from gpuscore.prompts.registry import FAMILIES, PRM, QWEN3_RERANKER, STEP_TOKEN, by_name
from gpuscore.text.tokenizer import TextEncoder

LOGIT_SCORE = "LogitScore"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """The head of a classification model.

    Args:
        num_classes: the number of classes, at least one.
        activation: turns logits into answers: "softmax" if exactly one class is right, "sigmoid"
            if several may be, "none" for the numbers of a regression.
        padding: the padding token; None: there is none.
    """

    num_classes: int
    activation: Activation
    padding: int | None = None


def read_classifier_head(directory: Path) -> ClassifierHead | None:
    """Return the classifier head, or None for a language model.

    Raises:
        ConfigError: the number of classes in config.json is not valid.
    """
    path = directory / "config.json"
    config = read_object(path) or {}
    if not architecture_name(config).endswith(CLASSIFIERS):
        return None
    names = config.get("id2label")
    if names is None:
        count = config.get("num_labels", 2)  # transformers' default
    else:
        count = len(as_object(names, f"{path}: id2label"))
    if type(count) is not int or count < 1:
        raise ConfigError(f"{path}: num_labels must be a positive integer, found {shown(count)}")
    text_config = _of_text(config)
    padding = text_config.get("pad_token_id")
    ends = text_config.get("eos_token_id")
    if padding is not None and padding in (ends if isinstance(ends, list) else [ends]):
        logger.warning(
            "%s: pad_token_id %s is eos_token_id, too. Prompts of a family are read before the "
            "padding tokens at their end, as in transformers; /v1/score and /v1/classify read the "
            "last token of what they get, where transformers would skip that token",
            path,
            padding,
        )
    return ClassifierHead(
        count,
        _head_activation(count, config.get("problem_type")),
        padding if type(padding) is int else None,
    )


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that is about text, in models that also read images."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _head_activation(num_classes: int, problem: object) -> Activation:
    """Return the activation that transformers' pipeline takes for this `problem_type`."""
    if problem == "regression":
        return "none"
    several = num_classes == 1 or problem == "multi_label_classification"
    return "sigmoid" if several else "softmax"


def find_family(
    requested: str,
    directory: Path,
    names: Iterable[str],
    specials: Sequence[str],
    head: ClassifierHead | None = None,
) -> PromptFamily | None:
    """Return the model's family, or None if no source names one.

    Args:
        requested: "auto", "none", or a name of the registry.
        directory: the model's.
        names: the names of the model.
        specials: its tokenizer's special tokens, as text.
        head: the classifier head, if the model has one.

    Raises:
        ConfigError: the files contradict each other or have unsupported content.
    """
    if requested in ("none", PRM):
        return None
    if requested not in ("auto", *FAMILIES):
        raise ConfigError(
            f"family {shown(requested)} is unknown; supported: auto, none, {', '.join(FAMILIES)}, "
            f"{PRM}"
        )
    if requested != "auto":
        return _for_head(_resolved(FAMILIES[requested], directory, specials), head)
    config = read_object(directory / "config.json") or {}
    known = by_name(names, architecture_name(config))
    if config.get("is_original_qwen3_reranker") is True:  # vLLM's key
        known = QWEN3_RERANKER
    chosen = _sentence_transformers(directory, specials, known, head)
    if chosen is None and known is not None:
        chosen = _resolved(known, directory, specials)
        _check_tokens(config, chosen, directory)
    if chosen is None or (head is not None and head.num_classes > 1):
        return None  # it is unknown which of several classes means relevant
    if head is not None and not chosen.ranks:
        return None  # the meaning of a guard's one class is unknown
    return _for_head(chosen, head)


def find_step_token(requested: str, directory: Path, encoder: TextEncoder | None) -> int | None:
    """Return the id of the token after each step of an answer, at which a process reward model
    judges the step; None for other models, and for one without a tokenizer.

    Args:
        requested: "auto", "none", "prm", or a name of the registry.
        directory: the model's.
        encoder: the model's tokenizer.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    config = read_object(directory / "config.json") or {}
    is_prm = requested == "auto" and architecture_name(config).endswith(PROCESS_REWARD)
    if encoder is None or not (is_prm or requested == PRM):
        return None
    ids = encoder.plain_ids(STEP_TOKEN).tolist()
    if len(ids) != 1:
        raise ConfigError(
            f"--family {PRM}: {STEP_TOKEN} is {len(ids)} tokens of the model's tokenizer, it must "
            "be one; with --family none requests name another token (score_extraction_token)"
        )
    return int(ids[0])


def _check_tokens(config: Mapping[str, Any], family: PromptFamily, directory: Path) -> None:
    """Raise ConfigError unless vLLM's keys, if they are there, give the family's own formula.

    vLLM documents two: the logit of the second token less that of the first, or that of one token.
    """
    tokens = config.get(FROM_TOKENS)
    method = config.get("method")
    if tokens is None:
        return
    methods = ("no_post_processing",) if len(family.labels) == 1 else (None, "from_2_way_softmax")
    expected = [*reversed(family.labels)]
    if tokens != expected or method not in methods:
        raise ConfigError(
            f"{directory / 'config.json'}: {FROM_TOKENS} is {shown(tokens)} and method "
            f"{shown(method)}; the family {family.name} has {shown(expected)} and "
            f"{shown(methods[-1])}; to be served by the family, name the architecture "
            "...ForCausalLM and delete both keys"
        )


def _for_head(family: PromptFamily, head: ClassifierHead | None) -> PromptFamily:
    """Adapt a family to the model's head, which a conversion may replace while the prompt stays."""
    if head is None:
        if family.one_class:
            raise ConfigError(
                f"models of the family {family.name} have a head of one class; this one has a "
                "vocabulary"
            )
        return family
    if head.num_classes != 1:
        raise ConfigError(
            f"--family {family.name}: the model has {head.num_classes} classes; supported: one"
        )
    if not family.ranks:
        raise ConfigError(
            f"--family {family.name}: the model's head is one class, and a guard of this family "
            f"answers with one of {len(family.classes)}; {WITHOUT_FAMILY}"
        )
    family = replace(family, labels=(ONLY_CLASS,), one_class=True, padding=head.padding)
    if head.activation == "none":
        return replace(family, activation="none", scale=1.0)
    return family


def _resolved(family: PromptFamily, directory: Path, specials: Sequence[str]) -> PromptFamily:
    if family.parts:
        return family
    template = ChatTemplate.read(directory)
    if template is None:
        raise ConfigError(
            f"prompts of the family {family.name} are made by the model's chat template, and "
            f"{directory} has none; {WITHOUT_FAMILY}"
        )

    def rendered(messages: Messages) -> tuple[tuple[str, ...], dict[str, Ends]]:
        text, ends = template.marked_and_ends(messages, family.options)
        parts = parts_of(text, specials)
        # The model would generate the beginning of the answer, so it is tokenised as its own part.
        if family.answer:
            parts = (*parts, literal(family.answer))
        return parts, {**ends, **family.strip}

    parts, strip = rendered(family.messages)
    answering_parts, answering_strip = rendered(family.answering) if family.answering else ((), {})

    return replace(
        family,
        parts=parts,
        strip=strip,
        answering_parts=answering_parts,
        answering_strip=answering_strip,
    )


def _sentence_transformers(
    directory: Path,
    specials: Sequence[str],
    known: PromptFamily | None,
    head: ClassifierHead | None,
) -> PromptFamily | None:
    """Return the family that sentence-transformers' files define, or None without such files.

    They are modules.json, the configuration of the module that reads the logits unless the model
    has a head of classes, and the chat template. The formula is that of a known family, if there is
    one.
    """
    read_by = _score_module(directory)
    message = _message_settings(directory)
    if read_by is None and (head is None or message is None):
        return None
    if read_by is not None:
        _check_alone(read_by, directory)
    labels = (ONLY_CLASS,) if read_by is None else _score_labels(read_by, directory)
    template = ChatTemplate.read(directory)
    if template is None:
        what = "takes messages" if read_by is None else f"has a {LOGIT_SCORE} module"
        raise ConfigError(f"{directory} {what} but has no chat template")
    instruction = _instruction(directory / "config_sentence_transformers.json")
    system = [("system", "{" + INSTRUCTION + "}")] if instruction else []
    messages = [*system, (QUERY, "{" + QUERY + "}"), (DOCUMENT, "{" + DOCUMENT + "}")]
    pieces = {"flat": False, "structured": True}.get((message or {}).get("format", ""))
    settings = directory / "sentence_bert_config.json"
    variables = _within(settings, "processing_kwargs", "chat_template")
    text, strip = template.marked_and_ends(messages, variables, pieces)
    formula = _formula(directory)
    if known is not None and known.parts and known.ranks:
        if formula != (known.activation, known.scale):
            described = f"{known.name} as {formula_of(known.activation, known.scale)}"
            logger.warning(
                "the files of %s give relevance as %s, and the family %s, which holds",
                directory,
                formula_of(*formula),
                described,
            )
        formula = known.activation, known.scale
    return PromptFamily(
        name=f"sentence-transformers {directory.name}",
        source=str(directory / "modules.json"),
        parts=parts_of(text, specials),
        labels=labels,
        instruction=instruction,
        activation=formula[0],
        scale=formula[1],
        strip=strip,
    )


def _formula(directory: Path) -> tuple[Activation, float]:
    """Return the activation and the scale of sentence-transformers' files.

    Raises:
        ConfigError: the activation is neither a sigmoid nor the identity.
    """
    path = directory / "config_sentence_transformers.json"
    name = _within(path).get("activation_fn")
    if name is None:  # older versions wrote it here
        path = directory / "config.json"
        older = _within(path).get("sbert_ce_default_activation_function")
        name = _within(path, "sentence_transformers").get("activation_fn", older)
    if name in (None, *_torch_names("activation", "Sigmoid")):  # the default
        return "sigmoid", 1.0
    if name in _torch_names("linear", "Identity"):
        return "none", 1.0
    raise ConfigError(
        f"{path}: activation_fn is {shown(name)}; supported: torch.nn.Sigmoid, torch.nn.Identity; "
        "--family names a prompt and a formula instead"
    )


def _torch_names(module: str, name: str) -> tuple[str, str]:
    return f"torch.nn.{name}", f"torch.nn.modules.{module}.{name}"


def _score_module(directory: Path) -> Path | None:
    """Return the path of the configuration of the module that reads the logits, or None."""
    path = directory / "modules.json"
    modules = read_json(path)
    if modules is None:
        return None
    if not isinstance(modules, list):
        raise ConfigError(f"{path} must be a list of modules, found {shown(modules)}")
    every = [as_object(module, f"each module of {path}") for module in modules]
    places = [m.get("path") for m in every if str(m.get("type", "")).endswith("." + LOGIT_SCORE)]
    if not places:
        return None
    if not isinstance(places[0], str) or Path(places[0]).name != places[0]:
        raise ConfigError(
            f"{path}: path is {shown(places[0])}; supported: a folder of the model's directory"
        )
    return directory / places[0] / "config.json"


def _message_settings(directory: Path) -> dict[str, Any] | None:
    """Return how sentence-transformers gives the model its chat template's prompts; None if it does
    not."""
    kinds = _within(directory / "sentence_bert_config.json", "modality_config")
    if "message" not in kinds or not (directory / "modules.json").exists():
        return None
    return _within(directory / "sentence_bert_config.json", "modality_config", "message")


def _check_alone(read_by: Path, directory: Path) -> None:
    """Raise ConfigError if config.json, too, says what the logits mean."""
    path = directory / "config.json"
    config = read_object(path) or {}
    keys = [key for key in (FROM_TOKENS, "is_original_qwen3_reranker") if config.get(key)]
    if architecture_name(config).endswith(CLASSIFIERS):
        keys.append("architectures")
    if keys:
        raise ConfigError(
            f"{path} has {keys[0]} {shown(config[keys[0]])}, and {read_by} names tokens, too; "
            "delete one of them, or choose with --family"
        )


def _score_labels(path: Path, directory: Path) -> tuple[int, ...]:
    """Return the id of the true token, and of the false one if there is one."""
    config = read_object(path)
    if config is None:
        raise ConfigError(f"{path} is missing")
    rows = _of_text(read_object(directory / "config.json") or {}).get("vocab_size")
    last = rows - 1 if type(rows) is int else 2**31 - 1
    names = ("true_token_id", "false_token_id")
    labels = [config.get(name) for name in names]
    for name, label in zip(names, labels, strict=True):
        missing = label is None and name == "false_token_id"
        if not missing and (type(label) is not int or not 0 <= label <= last):
            raise ConfigError(
                f"{path}: {name} must be the id of a token, 0 to {last}, found {shown(label)}"
            )
    return tuple(label for label in labels if label is not None)


def _instruction(path: Path) -> str:
    """Return the default prompt; empty if there is none."""
    prompts = _within(path, "prompts")
    name = _within(path).get("default_prompt_name")
    if name is None:
        return ""
    prompt = prompts.get(name, "") if isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise ConfigError(f"{path}: the prompt of default_prompt_name must be a text")
    return prompt


def _within(path: Path, *names: str) -> dict[str, Any]:
    """Return the object in a JSON file that these keys lead to; an absent one is empty."""
    found = read_object(path) or {}
    for name in names:
        found = as_object(found.get(name) or {}, f"{path}: {name}")
    return found
