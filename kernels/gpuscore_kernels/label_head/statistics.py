"""Result type of `vocab_statistics`."""

from typing import NamedTuple

from torch import Tensor


class VocabStatistics(NamedTuple):
    """Statistics of each row over the vocabulary; see `api.vocab_statistics`."""

    lse: Tensor
    top_ids: Tensor | None
    top_logits: Tensor | None
