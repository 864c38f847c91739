"""Options of calls that `Scorer`, `AsyncScorer` and the clients have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuscore.item_errors import OnError

Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Text: TypeAlias = str | Ids
Items: TypeAlias = str | Sequence[str] | Sequence[Ids]
Labels: TypeAlias = Sequence[str] | None
LabelIds: TypeAlias = Ids | Sequence[Ids] | None
LabelSequences: TypeAlias = Sequence[Ids] | None
# "mean": the sum of a label's log-probabilities is divided by its number of tokens.
Normalization: TypeAlias = Literal["none", "mean"]


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options of `score` besides query and items."""

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

    @property
    def names(self) -> tuple[str, ...]:
        """The labels' texts, or their ids; empty if items have labels of their own."""
        if self.label_sequences is not None:
            return tuple(" ".join(map(str, ids)) for ids in self.label_sequences)
        given: Sequence[Any] = ()
        if self.labels is not None:
            given = self.labels
        elif self.label_token_ids is not None:
            given = list(self.label_token_ids)
        plain = all(isinstance(label, str | int | np.integer) for label in given)
        return tuple(map(str, given)) if plain else ()


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """The options of `rerank` and `score_pairs`, which use the prompt of the model's family."""

    instruction: str | None = None
    raw_scores: bool = False
    max_tokens_per_doc: int | None = None
    truncate: bool = False
    on_error: OnError = "fail"
