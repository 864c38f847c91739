"""Prompt families: the prompt, labels and formula of a kind of reranker, guard or reward model."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from gpuscore.types.batch import Float64Array

QUERY = "query"
DOCUMENT = "document"
INSTRUCTION = "instruction"
# The only label of a model whose head gives one number instead of a vocabulary, see `one_class`.
ONLY_CLASS = 0

Activation: TypeAlias = Literal["softmax", "sigmoid", "none"]
# Characters that are dropped before and after a text; None: all white space.
Ends: TypeAlias = tuple[str | None, str | None]
STRIPPED: dict[str, Ends] = dict.fromkeys((QUERY, DOCUMENT), (None, None))


Messages = Sequence[tuple[str, str]]  # (role, content); the content has fields such as {query}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFamily:
    """A family of models that judge a text by the next token or by a head with one class.

    Requests do not change it, except that they may bring their own instruction. A prompt is made of
    parts that are tokenised one by one. Control tokens are recognised only in parts without a
    field, which are the family's own text. Parts with fields contain a caller's text, so no text
    can end its turn in the conversation or begin another one.

    Args:
        name: the value of `--family`.
        source: the origin of the prompt and the formula.
        labels: the tokens, or their ids, whose logits are read. For ranking, the first one means
            relevant and the second one, if any, means not relevant.
        classes: names of the labels in answers; they make the family a guard, whose labels may be
            several tokens: only the first is read.
        instruction: used if a request has none.
        activation: turns a raw score into a relevance: "sigmoid" of raw / scale, which for two
            labels and scale 1 is their softmax; or "none".
        scale: divisor of raw scores.
        one_class: the only label is the class of a head, not a token.
        padding: the padding token of a model with a head, or None. transformers reads the head at
            the last token that is not padding.
        parts: have the fields {instruction}, {query} and {document}, the document once. The
            documents of a query share the text before the document.
            Only guards may lack a query. Empty if the model's chat template makes them.
        answering_parts: a guard's parts for a text that answers a query.
        strip: the characters that are dropped around each field's text, besides those that the
            chat template drops.
        answering_strip: `strip` in `answering_parts`.
        messages: the conversation of which the chat template makes the parts; its contents have the
            fields of parts.
        answering: a guard's conversation for a text that answers a query.
        answer: the beginning of the model's answer, before the label.
        options: variables of the chat template, such as add_generation_prompt.
        named: a pattern for the beginning of a model's name without its owner, and the beginning
            of its architecture.

    Raises:
        ValueError: the parts lack a required field, have an unknown one, or the document twice.
    """

    name: str
    source: str
    labels: tuple[str | int, ...]
    classes: tuple[str, ...] = ()
    instruction: str = ""
    activation: Activation = "sigmoid"
    scale: float = 1.0
    one_class: bool = False
    padding: int | None = None
    parts: tuple[str, ...] = ()
    answering_parts: tuple[str, ...] = ()
    strip: Mapping[str, Ends] = field(default_factory=dict)
    answering_strip: Mapping[str, Ends] = field(default_factory=dict)
    messages: Messages = ()
    answering: Messages = ()
    answer: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    named: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        needed = {DOCUMENT} if self.classes else {QUERY, DOCUMENT}
        if self.parts:
            self._check(self.parts, needed)
        if self.answering_parts:
            self._check(self.answering_parts, {QUERY, DOCUMENT})
        if self.classes and len(self.classes) != len(self.labels):
            raise ValueError(f"{self.name} has {len(self.classes)} classes")
        if not self.classes and len(self.labels) not in (1, 2):
            raise ValueError(f"{self.name} has {len(self.labels)} labels")

    def _check(self, parts: tuple[str, ...], needed: set[str]) -> None:
        names = [name for part in parts for name in fields_of(part)]
        known = {QUERY, DOCUMENT, INSTRUCTION}
        if names.count(DOCUMENT) != 1 or not needed <= set(names) <= known:
            raise ValueError(f"the prompt of {self.name} has the fields {names}")

    @property
    def ranks(self) -> bool:
        """True if the family orders documents by relevance; False for guards."""
        return not self.classes

    @property
    def takes_instruction(self) -> bool:
        return any(INSTRUCTION in fields_of(part) for part in self.parts)

    @property
    def shares_query(self) -> bool:
        """True if the documents of a query share it, because it comes before the document."""
        names = [name for part in self.parts for name in fields_of(part)]
        return QUERY not in names[names.index(DOCUMENT) :]

    def raw_scores(self, logits: Float64Array) -> Float64Array:
        """Return [N] from logits [N, labels]: the first logit, less the second if there is one."""
        if len(self.labels) == 1:
            return logits[:, 0]
        difference: Float64Array = logits[:, 0] - logits[:, 1]
        return difference

    def relevance(self, raw: Float64Array) -> Float64Array:
        """Return relevances [N], from 0 to 1 unless the activation is "none"."""
        if self.activation == "none":
            return raw / self.scale
        return sigmoid(raw / self.scale)


def formula_of(activation: Activation, scale: float, raw: str = "raw") -> str:
    """Return the formula of relevances as text."""
    divided = f"({raw})" if " " in raw else raw
    scaled = raw if scale == 1 else f"{divided} / {scale:g}"
    return scaled if activation == "none" else f"sigmoid({scaled})"


def sigmoid(x: Float64Array) -> Float64Array:
    small = np.exp(-np.abs(x))
    probabilities: Float64Array = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return probabilities


def fields_of(part: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(part) if name is not None]


def literal(text: str) -> str:
    """Escape a text's braces, which would be fields in a part."""
    return text.replace("{", "{{").replace("}", "}}")


def filled(part: str, **values: str) -> str:
    """Replace the fields of a part by values; fields inside the values are not replaced."""
    return part.format_map(values)


class DocumentTemplate:
    """The parts of a family's prompt, split at the part with the document."""

    def __init__(self, parts: tuple[str, ...], strip: Mapping[str, Ends]) -> None:
        self._strip = strip
        place = next(i for i, part in enumerate(parts) if DOCUMENT in fields_of(part))
        self.before = parts[:place]
        self.last = parts[place]
        self.after = parts[place + 1 :]
        # The parts before the first caller's text.
        fixed = next(i for i, part in enumerate(parts) if fields_of(part))
        self.fixed = parts[:fixed]

    def text(self, field: str, value: str) -> str:
        """Return the text of a field as it goes into the prompt."""
        before, after = self._strip.get(field, ("", ""))
        return value.lstrip(before).rstrip(after)
