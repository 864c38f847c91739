"""The embedding and the label head of a model whose vocabulary the ranks divide among themselves.

No row of logits over the vocabulary leaves a rank: of each scored row the ranks exchange its
log-sum-exp and the most probable tokens, and add up the logits of labels, which one of them has.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.torch.head import Head
from gpuscore.backends.torch.ranks.group import RankGroup
from gpuscore_kernels.label_head import VocabStatistics


class ShardedVocabulary:
    """This rank's tokens of the embedding and the head.

    Args:
        group: the ranks.
        tokens: of the whole vocabulary.
        head: of a single process, which computes this rank's part.
    """

    def __init__(self, group: RankGroup, tokens: int, head: Head) -> None:
        self._group, self._head = group, head
        self._first = group.shard.share(tokens).start

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings [T, E] of tokens [T]; `table` [v, E] has those of this rank."""
        own, there = _own(token_ids, self._first, len(table))
        rows = functional.embedding(own, table)
        return self._group.sum(rows.masked_fill(~there[:, None], 0))

    def logits(self, hidden: Tensor, weight: Tensor, rows: Tensor, label_ids: Tensor) -> Tensor:
        own, there = _own(label_ids, self._first, len(weight))
        logits = self._head.logits(hidden, weight, rows, own)
        return self._group.sum(logits.masked_fill(~there, 0))

    def statistics(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, num_top: int
    ) -> VocabStatistics:
        found = self._head.statistics(hidden, weight, rows, num_top)
        lse = torch.stack(self._group.gather(found.lse)).logsumexp(dim=0)
        if found.top_ids is None or found.top_logits is None:
            return VocabStatistics(lse, None, None)
        ids = torch.cat(self._group.gather(found.top_ids + self._first), dim=1)
        logits = torch.cat(self._group.gather(found.top_logits), dim=1)
        # Stable: of equal logits the lower rank's, which has the lower ids, come first.
        best, order = logits.sort(dim=1, descending=True, stable=True)
        return VocabStatistics(lse, ids.gather(1, order[:, :num_top]), best[:, :num_top])


def _own(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the places of ids among `count` from `first` on, 0 for others, and which are there."""
    places = ids - first
    there = (places >= 0) & (places < count)
    return places.where(there, 0), there
