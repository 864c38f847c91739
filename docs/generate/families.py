"""The reference pages of the prompt families and of other servers' flags."""

import re

from generate.markdown import code, page, table
from gpuscore.config.flags import other_flags
from gpuscore.prompts.family import Messages, PromptFamily
from gpuscore.prompts.registry import FAMILIES

OURS = re.compile(r"(?<![\w`-])(--[a-z][a-z-]*[a-z]|[A-Z]+_[A-Z_]+)(?![\w`-])")


def page_of_families() -> str:
    blocks = []
    for name, family in FAMILIES.items():
        blocks += [f"## {name}", *_prompt(family), *_facts(family)]
    return page(
        "Prompts of the families",
        "The prompts that the server makes, with the labels that it reads after them. "
        "[Prompt families](../families.md) has their formulas and says how a family is chosen.",
        *blocks,
    )


def _prompt(family: PromptFamily) -> list[str]:
    if family.parts:
        return [_fenced("".join(family.parts))]
    blocks = ["The model's chat template around this conversation:", _talk(family.messages)]
    if family.answering:
        blocks += ["or, if the text answers a query,", _talk(family.answering)]
    if family.answer:
        blocks.append(f"followed by the beginning of the answer, {code(_escaped(family.answer))}.")
    return blocks


def _talk(messages: Messages) -> str:
    return _fenced("\n".join(f"[{role}] {text}" for role, text in messages))


def _fenced(prompt: str) -> str:
    """Return a block that keeps the line ends of a prompt's end."""
    return f"```text\n{prompt}\n```"


def _facts(family: PromptFamily) -> list[str]:
    labels = ", ".join(code(label) for label in family.labels if isinstance(label, str))
    source = f"<{family.source}>" if "://" in family.source else code(family.source)
    facts = [f"Labels: {labels or 'the only class of the head'}."]
    if family.instruction:
        facts.append(f"Default instruction: {code(family.instruction)}.")
    return [*facts, f"Source: {source}"]


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode()


def page_of_other_flags() -> str:
    told: dict[str, list[str]] = {}
    for name, meaning in other_flags().items():
        told.setdefault(meaning, []).append(code(name))
    rows = [(", ".join(names), OURS.sub(r"`\1`", _here(said))) for said, names in told.items()]
    return page(
        "Flags of other servers",
        "What flags of vLLM, SGLang and TEI are called here, or why there are none. "
        "`gpuscore serve` says the same when it gets one. The same everywhere: `--dtype`, "
        "`--device`, `--host`, `--port`, `--max-model-len`, `--max-queued-requests`, "
        "`--quantization`, `--revision`. [Coming from another server](../how-to/coming-from.md) "
        "compares the routes.",
        table(("their flag", "here"), rows),
    )


def _here(said: str) -> str:
    return said.removeprefix("is ").removesuffix(" here").replace("not supported: ", "none: ", 1)
