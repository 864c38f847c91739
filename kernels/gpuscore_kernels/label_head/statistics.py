"""What the implementations of `vocab_statistics` give."""

from typing import NamedTuple

from torch import Tensor


class VocabStatistics(NamedTuple):
    """Of each row; see `api.vocab_statistics`."""

    lse: Tensor
    top_ids: Tensor | None
    top_logits: Tensor | None
