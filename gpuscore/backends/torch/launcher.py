"""Launchers, which run a batch on the device, and the label heads that they use.

`PlainLauncher` works with any device and any kernels. `graph_launcher` has another launcher, which
runs our Triton kernels as CUDA graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.torch.attention.choice import AttentionBackend
from gpuscore.backends.torch.decoder import Decoder, ForwardContext
from gpuscore.backends.torch.delta_net.layer import DeltaNetBackend
from gpuscore.backends.torch.group import RankGroup
from gpuscore.backends.torch.kv_pool import KeptRows, KVPool
from gpuscore.backends.torch.layers import ByRows
from gpuscore.types.batch import PackedBatch, RowScores
from gpuscore_kernels import Implementation
from gpuscore_kernels.label_head import (
    Products,
    VocabStatistics,
    label_logits,
    vocab_statistics,
)


class Head(Protocol):
    """Computes labels' logits and statistics over the vocabulary from hidden states [N, E]."""

    def logits(self, hidden: Tensor, weight: Tensor, rows: Tensor, label_ids: Tensor) -> Tensor:
        """Return the logit of token `label_ids[i]` in row `rows[i]`, [L]."""

    def statistics(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, num_top: int
    ) -> VocabStatistics:
        """Return the log-sum-exp [M] and the most probable tokens [M, num_top] of these rows."""


@dataclass(frozen=True, slots=True)
class WholeHead:
    """A label head over the whole vocabulary; `ShardedVocabulary` divides it between ranks."""

    impl: Implementation  # of the kernels
    softcap: float | None  # limit of the logits; None = no limit
    products: Products | None = None  # replaces the reference's matrix product for few rows

    def logits(self, hidden: Tensor, weight: Tensor, rows: Tensor, label_ids: Tensor) -> Tensor:
        return label_logits(hidden, weight, rows, label_ids, softcap=self.softcap, impl=self.impl)

    def statistics(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, num_top: int
    ) -> VocabStatistics:
        return vocab_statistics(
            hidden,
            weight,
            rows,
            num_top=num_top,
            softcap=self.softcap,
            products=self.products,
            impl=self.impl,
        )


Finish: TypeAlias = Callable[[], RowScores]  # waits for the device


class Launcher(ABC):
    """Runs forward passes of one model over one KV pool.

    The methods about CUDA graphs do nothing unless a subclass has graphs.
    """

    decoder: Decoder

    @abstractmethod
    def launch(self, batch: PackedBatch) -> Finish:
        """Queue a batch; the returned function waits for its scores."""

    def is_quick(self, batch: PackedBatch) -> bool:
        """True if `launch` takes about a millisecond, because the batch has a graph.

        Any thread may launch a graph. A batch without a graph belongs on the backend's thread,
        whose cuBLAS workspace was allocated when memory was measured at start.
        """
        return False

    def capture(self) -> int:
        """Capture the missing CUDA graphs, check each of them, and wait until that is done.

        Returns:
            The number of captured graphs.

        Raises:
            ConfigError: a graph's results differ from those of single launches.
        """
        return 0

    def capture_largest(self) -> None:  # noqa: B027  (there may be no graphs)
        """Capture the largest graph only, which takes the most memory."""

    def release(self) -> None:  # noqa: B027
        """Drop all graphs; nothing may be launched afterwards."""


@dataclass(eq=False)
class PlainLauncher(Launcher):
    """Launches one operator after another; when `launch` returns, the scores are known."""

    decoder: Decoder
    pool: KVPool
    attention: AttentionBackend
    linear: DeltaNetBackend | None
    head: Head
    by_rows: ByRows

    @torch.inference_mode()
    def launch(self, batch: PackedBatch) -> Finish:
        context = ForwardContext(
            self.attention.prepare(batch),
            KeptRows.of(batch.slot_mapping, self.pool),
            None if self.linear is None else self.linear.prepare(batch),
        )
        hidden = self.decoder(
            self._to_device(batch.token_ids),
            self._to_device(batch.positions),
            self._to_device(batch.score_rows),
            context,
        )
        scores = self._score(hidden, batch)
        return lambda: scores

    def _score(self, hidden: Tensor, batch: PackedBatch) -> RowScores:
        weight = self.decoder.weights.lm_head

        def label_logits(rows: Tensor, ids: Tensor) -> Tensor:
            return self.head.logits(hidden, weight, rows, ids)

        def statistics(rows: Tensor) -> tuple[Tensor, ...]:
            found = self.head.statistics(hidden, weight, rows, batch.num_top)
            return tuple(values for values in found if values is not None)

        logits = self.by_rows(label_logits, 2)(
            self._to_device(batch.label_rows), self._to_device(batch.label_token_ids)
        )
        rows = statistics_rows(batch)
        found = self.by_rows(statistics)(self._to_device(rows)) if len(rows) else ()
        return row_scores(batch, logits.cpu().numpy(), [values.cpu().numpy() for values in found])

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.pool.device)


def statistics_rows(batch: PackedBatch) -> np.ndarray:
    """Return the numbers of the scored rows that need log-sum-exp or top tokens, int64."""
    if batch.num_top:
        return np.arange(len(batch.score_rows))
    return batch.need_lse.nonzero()[0]


def row_scores(
    batch: PackedBatch, logits: np.ndarray, statistics: Sequence[np.ndarray]
) -> RowScores:
    """Build the results that the engine gets.

    Args:
        batch: the batch that was run.
        logits: [L]; float32 arrays are not copied.
        statistics: arrays over `statistics_rows`: none; lse; or lse, top_ids and top_logits.
            top_ids and top_logits are [rows, num_top] or flat.
    """
    logits = logits.astype(np.float32, copy=False)
    if not statistics:
        return RowScores(logits, None, None, None)
    lse = statistics[0].astype(np.float32, copy=False)
    if len(lse) < len(batch.score_rows):
        known_lse = lse
        lse = np.full(len(batch.score_rows), np.nan, dtype=np.float32)
        lse[statistics_rows(batch)] = known_lse
    if len(statistics) == 1:
        return RowScores(logits, lse, None, None)
    # With num_top, `statistics_rows` are all scored rows.
    top_ids, top_logits = (part.reshape(-1, batch.num_top) for part in statistics[1:])
    best = top_logits.astype(np.float32, copy=False)
    return RowScores(logits, lse, top_ids.astype(np.int32, copy=False), best)


class ShardedVocabulary:
    """This rank's part of the embedding and of the label head; each rank holds some tokens.

    Ranks never exchange logits of the whole vocabulary. For each scored row they exchange the
    log-sum-exp and the most probable tokens. A label's logit is known to one rank; the others
    add 0 to it.

    Args:
        group: the ranks.
        tokens: the size of the whole vocabulary.
        head: computes logits and statistics of this rank's tokens.
    """

    def __init__(self, group: RankGroup, tokens: int, head: Head) -> None:
        self._group = group
        self._head = head
        self._first = group.shard.range_of(tokens).start

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings [T, E] of tokens [T]; `table` [v, E] is this rank's part."""
        local_ids, is_local = _local(token_ids, self._first, len(table))
        rows = functional.embedding(local_ids, table)
        return self._group.sum(rows.masked_fill(~is_local[:, None], 0))

    def logits(self, hidden: Tensor, weight: Tensor, rows: Tensor, label_ids: Tensor) -> Tensor:
        local_ids, is_local = _local(label_ids, self._first, len(weight))
        logits = self._head.logits(hidden, weight, rows, local_ids)
        return self._group.sum(logits.masked_fill(~is_local, 0))

    def statistics(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, num_top: int
    ) -> VocabStatistics:
        local = self._head.statistics(hidden, weight, rows, num_top)
        lse = torch.stack(self._group.gather(local.lse)).logsumexp(dim=0)
        if local.top_ids is None or local.top_logits is None:
            return VocabStatistics(lse, None, None)
        ids = torch.cat(self._group.gather(local.top_ids + self._first), dim=1)
        logits = torch.cat(self._group.gather(local.top_logits), dim=1)
        # A stable sort: of equal logits, the one with the lower token id comes first.
        best, order = logits.sort(dim=1, descending=True, stable=True)
        return VocabStatistics(lse, ids.gather(1, order[:, :num_top]), best[:, :num_top])


def _local(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return each id minus `first`, or 0 if it is not in [first, first + count); and which are."""
    local_ids = ids - first
    is_local = (local_ids >= 0) & (local_ids < count)
    return local_ids.where(is_local, 0), is_local
