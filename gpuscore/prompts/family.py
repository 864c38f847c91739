"""What is fixed about a family of models; nothing of it ever comes from a request."""

import string
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpuscore.arrays import Float64Array

QUERY, DOCUMENT, INSTRUCTION = "query", "document", "instruction"
# The only label of a model whose head is one number and no vocabulary: a class, see `one_class`.
ONLY_CLASS = 0


@dataclass(frozen=True, slots=True)
class PromptFamily:
    """One family of models that judge a text by the token they would say next, or by their head.

    A prompt is made of parts that are tokenised one by one. Parts without a field are the family's
    own, and special tokens in them are special tokens; parts with fields hold a caller's text, in
    which nothing is special, so no text can end its turn or begin another's.

    Args:
        name: as in `--family`.
        source: where prompt and formula are from.
        parts: with the fields {instruction}, {query} and {document}, each at most once, the
            document's last, so that all documents of a query share what is before it. Only guards
            may do without a query.
        labels: the tokens, or their ids, whose logits are read. Of what ranks documents the first
            says relevant, and the second, if there is one, that it is not.
        classes: what the labels are called in answers; makes the family a guard.
        answering_parts: a guard's, where the text answers a query.
        first_tokens: a label may be several tokens, of which the first is read.
        instruction: where a request has none.
        activation: from a raw score to a relevance: "sigmoid" of raw / scale, which of two labels
            and scale 1 is their softmax; or "none".
        scale: what raw scores are divided by.
        strip: white space around the texts is dropped.
        one_class: labels are classes of a head that has one, and no tokens.

    Raises:
        ValueError: parts without a document, or with anything else.
    """

    name: str
    source: str
    parts: tuple[str, ...]
    labels: tuple[str | int, ...]
    classes: tuple[str, ...] = ()
    answering_parts: tuple[str, ...] = ()
    first_tokens: bool = False
    instruction: str = ""
    activation: Literal["sigmoid", "none"] = "sigmoid"
    scale: float = 1.0
    strip: bool = False
    one_class: bool = False

    def __post_init__(self) -> None:
        needed = {DOCUMENT} if self.classes else {QUERY, DOCUMENT}
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
        if len(set(names)) < len(names) or not needed <= set(names) <= known:
            raise ValueError(f"the prompt of {self.name} has the fields {names}")
        if names[-1] != DOCUMENT:
            raise ValueError(f"the prompt of {self.name} ends with {names[-1]}, not the document")

    @property
    def ranks(self) -> bool:
        """Whether it orders documents by relevance; guards do not."""
        return not self.classes

    @property
    def takes_instruction(self) -> bool:
        return any(INSTRUCTION in fields_of(part) for part in self.parts)

    def text(self, value: str) -> str:
        """A query or a document as the prompt has it."""
        return value.strip() if self.strip else value

    def raw_scores(self, logits: Float64Array) -> Float64Array:
        """[N, labels] -> [N]: the first label's logit, or by how much it exceeds the other's."""
        if len(self.labels) == 1:
            return logits[:, 0]
        difference: Float64Array = logits[:, 0] - logits[:, 1]
        return difference

    def relevance(self, raw: Float64Array) -> Float64Array:
        """[N], from 0 to 1 unless the family has no activation."""
        if self.activation == "none":
            return raw / self.scale
        return sigmoid(raw / self.scale)


def sigmoid(x: Float64Array) -> Float64Array:
    small = np.exp(-np.abs(x))
    shares: Float64Array = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return shares


def fields_of(part: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(part) if name is not None]


def literal(text: str) -> str:
    """Text as it stands in a part, where braces are fields."""
    return text.replace("{", "{{").replace("}", "}}")


def filled(part: str, **values: str) -> str:
    """A part with its fields, or the first of them, put in; values are never read as parts."""
    return part.format_map(values)
