"""Prompts of one family for one tokenizer: query and documents to a `ScoreRequest`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    LabelNotSingleToken,
    PromptTooLong,
)
from gpuscore.families.family import (
    DOCUMENT,
    INSTRUCTION,
    QUERY,
    Family,
    fields_of,
    filled,
)
from gpuscore.text.prompts import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types import Float64Array, Int32Array, ScoreRequest, ScoreResult

# Tokens: a document's first and last may merge otherwise with what is beside them.
SPARE = 4


@dataclass(frozen=True, slots=True)
class RerankInput:
    """A caller's query and documents.

    Args:
        query: what documents are ranked by.
        documents: at least one.
        instruction: in place of the family's own.
        most_tokens: of a document, which is cut off behind them; None: never cut.
        fit: documents are cut so that their prompts fit the model's context.
    """

    query: str
    documents: Sequence[str]
    instruction: str | None = None
    most_tokens: int | None = None
    fit: bool = False
    priority: int = 0
    name: str = "documents"  # what the caller calls them, for errors


@dataclass(frozen=True, slots=True)
class Rerank:
    """A request to the engine, and which documents of it were cut."""

    request: ScoreRequest
    truncated: tuple[int, ...]


class FamilyPrompts:
    """The prompts of one served model.

    Raises:
        ConfigError: on creation, where the tokenizer does not have the family's labels as tokens.
    """

    def __init__(self, family: Family, builder: PromptBuilder) -> None:
        if builder.encoder is None:
            raise ConfigError(f"the model is a {family.name}, but has no tokenizer")
        self.family, self._builder = family, builder
        self._own: TextEncoder = builder.encoder
        self._foreign = builder.encoder.without_specials()
        self.label_ids = [self._label_id(label) for label in family.labels]
        place = next(i for i, part in enumerate(family.parts) if DOCUMENT in fields_of(part))
        self._before, self._last = family.parts[:place], family.parts[place]
        self._after = family.parts[place + 1 :]

    def build(self, given: RerankInput, cancelled: Callable[[], bool] = lambda: False) -> Rerank:
        """May take long for much text.

        Raises:
            GpuscoreError: as `PromptBuilder.build`, and InvalidRequest for an instruction that
                the family has no place for.
        """
        if not given.documents:
            raise InvalidRequest(f"{given.name} must hold at least one document", param=given.name)
        self._builder.check_count(given.name, len(given.documents))
        if given.instruction is not None and not self.family.takes_instruction:
            raise InvalidRequest(
                f"prompts of {self.family.name} have no instruction", param="instruction"
            )
        own = self.family.instruction
        values = {
            QUERY: self.family.text(given.query),
            INSTRUCTION: own if given.instruction is None else given.instruction,
        }
        shared = self._ids(self._before, values)
        closing = self._ids(self._after, values)
        head, _, tail = self._last.partition("{" + DOCUMENT + "}")
        head, tail = filled(head, **values), filled(tail, **values)
        around = len(shared) + len(closing)
        documents, truncated = self._cut(given, around, head + tail, cancelled)
        middles = self._foreign.joined(head, (f"{d}{tail}" for d in documents), item_first=False)
        request = self._builder.from_prompts(
            (np.concatenate((shared, middle, closing)) for middle in middles),
            num_prompts=len(documents),
            num_shared=len(shared) + self._foreign.num_shared(head),
            label_ids=self.label_ids,
            need_lse=False,
            priority=given.priority,
            name=given.name,
            cancelled=cancelled,
        )
        return Rerank(request, truncated)

    def raw_scores(self, result: ScoreResult) -> Float64Array:
        """[N] of the documents, in their order."""
        return self.family.raw_scores(np.stack(result.label_logits).astype(np.float64))

    def _label_id(self, label: str | int) -> int:
        if isinstance(label, int):
            return label
        try:
            return self._own.label_ids([label])[0]
        except LabelNotSingleToken as error:
            raise ConfigError(
                f"prompts of {self.family.name} are answered with {label!r}, which is not one "
                "token of this tokenizer"
            ) from error

    def _ids(self, parts: Iterable[str], values: dict[str, str]) -> Int32Array:
        found = [np.empty(0, np.int32)]
        for part in parts:
            encoder = self._foreign if fields_of(part) else self._own
            found.append(encoder.plain_ids(filled(part, **values)))
        return np.concatenate(found)

    def _cut(
        self, given: RerankInput, around: int, beside: str, cancelled: Callable[[], bool]
    ) -> tuple[list[str], tuple[int, ...]]:
        """The documents, and which of them are shorter than they came.

        Args:
            around: tokens of the parts before and behind that of the documents.
            beside: the text beside the document in its own part.
        """
        documents = [self.family.text(document) for document in given.documents]
        most = given.most_tokens
        if given.fit:
            room = self._builder.backend.max_model_len - around
            room -= len(self._foreign.plain_ids(beside)) + SPARE
            if room < 1:
                raise PromptTooLong(
                    f"the query leaves no room for a document, the limit is "
                    f"{self._builder.backend.max_model_len} tokens",
                    param=QUERY,
                )
            most = room if most is None else min(most, room)
        if most is None:
            return documents, ()
        shortened = []
        for document in documents:
            if cancelled():
                raise DeadlineExceeded("the request was given up")
            shortened.append(self._foreign.first_tokens(document, most))
        pairs = zip(shortened, documents, strict=True)
        return shortened, tuple(i for i, (short, whole) in enumerate(pairs) if short != whole)
