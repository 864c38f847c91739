"""Prompts for typed questions about one input: yes or no, one of several choices, a level.

The input comes first in all prompts, so it is computed once for N questions. A question ends with
the instruction to answer with one label, and the labels are scored as the next token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase, digits

from gpuscore.errors import ConfigError
from gpuscore.prompts.chat import ChatTemplate, parts_of
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import PromptFamily
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.request import ScoreRequest
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.turns import ALONE, Turns

YES_NO = ("yes", "no")
MAX_CHOICES, MAX_LEVELS = len(ascii_uppercase), len(digits)


@dataclass(frozen=True, slots=True)
class DecisionQuestion:
    """A question: its text, and the labels that are possible answers."""

    text: str
    labels: tuple[str, ...]


def predicate(statement: str) -> DecisionQuestion:
    text = f'Is this statement true?\n{statement}\nAnswer only "yes" or "no".'
    return DecisionQuestion(text, YES_NO)


def choice(instructions: str, choices: Sequence[tuple[str, str]]) -> DecisionQuestion:
    """Return a question whose answer is one choice.

    Args:
        instructions: the question.
        choices: 2 to MAX_CHOICES pairs of name and description.
    """
    labels = tuple(ascii_uppercase[: len(choices)])
    return DecisionQuestion(_listed(instructions, labels, choices, "letter"), labels)


def level(instructions: str, levels: Sequence[tuple[str, str]]) -> DecisionQuestion:
    """Return a question whose answer is one level.

    Args:
        instructions: the question.
        levels: 2 to MAX_LEVELS pairs of name and description, from low to high.
    """
    labels = tuple(digits[: len(levels)])
    return DecisionQuestion(_listed(instructions, labels, levels, "number"), labels)


def _listed(
    instructions: str, labels: Sequence[str], options: Sequence[tuple[str, str]], what: str
) -> str:
    lines = [
        f"{label}. {name}" + (f": {description}" if description else "")
        for label, (name, description) in zip(labels, options, strict=True)
    ]
    return "\n".join([instructions, *lines, f"Answer only with the {what} of one of these."])


class DecisionPrompts:
    """The prompts of one served model: its chat template, or plain text if it has none.

    Raises:
        ConfigError: on creation, if a label is not one token; the message says why the model
            cannot answer such questions.
    """

    def __init__(
        self, template: ChatTemplate | None, specials: Sequence[str], builder: PromptBuilder
    ) -> None:
        if builder.encoder is None or builder.backend.classes is not None:
            raise ConfigError("typed questions need a language model with a tokenizer")
        parts: tuple[str, ...] = ("{query}\n\n{document}\n\nAnswer:\n",)
        if template is not None:
            options = {"add_generation_prompt": True, "enable_thinking": False}
            messages = (("user", "{query}\n\n{document}"),)
            parts = parts_of(template.marked(messages, options), specials)
        labels = (*YES_NO, *ascii_uppercase, *digits)
        family = PromptFamily(
            "decisions", "", parts, labels, classes=labels, strip=template is not None
        )
        self._prompts = FamilyPrompts(family, builder)
        self._ids = dict(zip(labels, self._prompts.label_ids, strict=True))

    def build(
        self,
        input: str,
        questions: Sequence[DecisionQuestion],
        priority: int,
        turns: Turns = ALONE,
    ) -> ScoreRequest:
        """Return the request for these questions; raises GpuscoreError as `FamilyPrompts.build`."""
        given = RerankInput(
            query=input,
            documents=[question.text for question in questions],
            priority=priority,
            need_lse=True,
            name="questions",
            query_name="input",
        )
        labels = [[self._ids[label] for label in question.labels] for question in questions]
        return self._prompts.build(given, turns, labels).request
