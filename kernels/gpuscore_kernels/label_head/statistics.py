"""Result type of `vocab_statistics`, and its limit."""

from typing import NamedTuple

from torch import Tensor

MAX_TOP = 20  # best tokens of a row


class VocabStatistics(NamedTuple):
    """Statistics of each row over the vocabulary; see `api.vocab_statistics`."""

    lse: Tensor
    top_ids: Tensor | None
    top_logits: Tensor | None
