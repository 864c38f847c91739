"""What is fixed about a family of rerankers; nothing of it ever comes from a request."""

import string
from dataclasses import dataclass

import numpy as np

from gpuscore.types import Float64Array

QUERY, DOCUMENT, INSTRUCTION = "query", "document", "instruction"


@dataclass(frozen=True, slots=True)
class Family:
    """One family of causal language models that rank documents by the token they say next.

    A prompt is made of parts that are tokenised one by one. Parts without a field are the family's
    own, and special tokens in them are special tokens; parts with fields hold a caller's text, in
    which nothing is special, so no text can end its turn or begin another's.

    Args:
        name: as in `--reranker`.
        source: where prompt and formula are from.
        parts: with the fields {instruction}, {query} and {document}, each at most once, the
            document's last, so that all documents of a query share what is before it.
        positive: label, or its id, whose logit says relevant.
        negative: the one that says it is not; None: the first alone is the score.
        instruction: where a request has none.
        scale: relevance is sigmoid(raw score / scale); with two labels and 1, their softmax.
        strip: white space around query and document is dropped.

    Raises:
        ValueError: parts without a query or a document, or with anything else.
    """

    name: str
    source: str
    parts: tuple[str, ...]
    positive: str | int
    negative: str | int | None
    instruction: str = ""
    scale: float = 1.0
    strip: bool = False

    def __post_init__(self) -> None:
        names = [name for part in self.parts for name in fields_of(part)]
        known = {QUERY, DOCUMENT, INSTRUCTION}
        if len(set(names)) < len(names) or not {QUERY, DOCUMENT} <= set(names) <= known:
            raise ValueError(f"the prompt of {self.name} has the fields {names}")
        if names[-1] != DOCUMENT:
            raise ValueError(f"the prompt of {self.name} ends with {names[-1]}, not the document")

    @property
    def takes_instruction(self) -> bool:
        return any(INSTRUCTION in fields_of(part) for part in self.parts)

    @property
    def labels(self) -> list[str | int]:
        return [self.positive] if self.negative is None else [self.positive, self.negative]

    def text(self, value: str) -> str:
        """A query or a document as the prompt has it."""
        return value.strip() if self.strip else value

    def raw_scores(self, logits: Float64Array) -> Float64Array:
        """[N, labels] -> [N]: the first label's logit, or by how much it exceeds the other's."""
        if self.negative is None:
            return logits[:, 0]
        difference: Float64Array = logits[:, 0] - logits[:, 1]
        return difference

    def relevance(self, raw: Float64Array) -> Float64Array:
        """[N], from 0 to 1."""
        small = np.exp(-np.abs(raw / self.scale))
        shares: Float64Array = np.where(raw >= 0, 1.0, small) / (1.0 + small)
        return shares


def fields_of(part: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(part) if name is not None]


def literal(text: str) -> str:
    """Text as it stands in a part, where braces are fields."""
    return text.replace("{", "{{").replace("}", "}}")


def filled(part: str, **values: str) -> str:
    """A part with its fields, or the first of them, put in; values are never read as parts."""
    return part.format_map(values)
