"""Options of calls that `Scorer`, `AsyncScorer` and the clients have in common."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuscore.types.call_inputs import ids_or_lists, lists_of_ids, texts
from gpuscore.types.item_errors import OnError, check_text

Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Text: TypeAlias = str | Ids
Items: TypeAlias = str | Iterable[str] | Iterable[Ids]
Labels: TypeAlias = Iterable[str] | None
LabelIds: TypeAlias = Ids | Iterable[int] | Iterable[Ids] | None
LabelSequences: TypeAlias = Iterable[Ids] | None
# "mean": the sum of a label's log-probabilities is divided by its number of tokens.
Normalization: TypeAlias = Literal["none", "mean"]


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options of `score` besides query and items; labels become lists, read once.

    Raises:
        InvalidRequest: on creation, for labels that are neither text nor token ids.
    """

    labels: Labels = None
    label_token_ids: LabelIds = None
    label_sequences: LabelSequences = None
    label_length_normalization: Normalization = "none"
    apply_softmax: bool = False
    temperature: float = 1.0
    item_first: bool = False
    logprobs: bool = False
    on_error: OnError = "fail"
    logits: bool = False

    def __post_init__(self) -> None:
        readers: dict[str, Callable[[Any, str], object]] = {
            "labels": texts,
            "label_token_ids": ids_or_lists,
            "label_sequences": lists_of_ids,
        }
        for name, read in readers.items():
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, read(given, name))

    @property
    def names(self) -> tuple[str, ...]:
        """The labels' texts, or their ids; empty if items have labels of their own."""
        if self.label_sequences is not None:
            return tuple(" ".join(map(str, ids)) for ids in self.label_sequences)
        given = tuple(self.labels or self.label_token_ids or ())
        return () if any(isinstance(label, list) for label in given) else tuple(map(str, given))


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """The options of `rerank` and `score_pairs`, which use the prompt of the model's family.

    Raises:
        InvalidRequest: on creation, for an instruction that is no text.
    """

    instruction: str | None = None
    raw_scores: bool = False
    max_tokens_per_doc: int | None = None
    truncate: bool = False
    on_error: OnError = "fail"

    def __post_init__(self) -> None:
        if self.instruction is not None:
            check_text(self.instruction, "instruction")
