"""The test at start that a deterministic backend gives the same bits in every batch.

The backend's libraries, the CPU and the number of threads decide whether a row's bits depend on
its place in a batch. So the test runs on this machine, with the weights that will serve.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpuscore.backends.base import Backend
from gpuscore.errors import ConfigError
from gpuscore.types.arrays import NO_TOKENS, Int32Array
from gpuscore.types.batch import Prefix, Segment, pack, page_slots

ITEM_LENGTHS = (1, 3, 8, 15, 16, 17, 30, 31, 33, 20, 20, 20)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A query and items, which must get the same bits in whatever batches they are computed."""

    backend: Backend
    query: Int32Array
    items: tuple[Int32Array, ...]
    others: tuple[Int32Array, ...]  # segments of another request, between the items
    labels: Int32Array

    def beside_the_query(self, order: NDArray[np.int64]) -> Int32Array:
        """Return the bits of these items, in one batch with the query as their parent."""
        parent = Segment(self.query, 0, 0)
        items = [self._segment(self.items[i], len(self.query), 0, 0) for i in order]
        return self._bits([parent, *items], [Prefix(0, NO_TOKENS)])

    def on_the_cache(self, order: NDArray[np.int64]) -> Int32Array:
        """Return the bits of these items, over cached pages and between another request's segments.

        The query is first computed chunk by chunk into the pages.
        """
        limits = self.backend.limits
        page_size, chunk = limits.page_size, limits.deterministic_chunk
        pages = np.arange(-(-len(self.query) // page_size), dtype=np.int32)
        for start in range(0, len(self.query), chunk):
            part = self.query[start : start + chunk]
            slots = page_slots(pages, start, start + len(part), page_size)
            batch = pack([Segment(part, start, 0, slots=slots)], [Prefix(start, pages)])
            self.backend.collect(self.backend.extend(batch))
        segments = [Segment(self.others[0], 0, 1)]
        for index in order:
            segments.append(self._segment(self.items[index], len(self.query), 0, -1))
            segments.append(Segment(self.others[1 + index], 0, 1))
        return self._bits(segments, [Prefix(len(self.query), pages), Prefix(0, NO_TOKENS)])

    def _segment(self, tokens: Int32Array, start: int, prefix: int, parent: int) -> Segment:
        return Segment(tokens, start, prefix, parent, label_ids=self.labels, need_lse=True)

    def _bits(self, segments: list[Segment], prefixes: list[Prefix]) -> Int32Array:
        """Return the bits of label logits and log-sum-exp, as int32 [scored rows, labels + 1]."""
        scores = self.backend.collect(self.backend.extend(pack(segments, prefixes)))
        assert scores.lse is not None  # noqa: S101  (it was asked for)
        labels = scores.label_logits.reshape(len(scores.lse), -1)
        return np.column_stack((labels, scores.lse)).view(np.int32)


def check_same_bits(backend: Backend) -> None:
    """Raise ConfigError if an item's bits differ between batches."""
    trial = _trial(backend)
    order = np.arange(len(trial.items))
    want = trial.beside_the_query(order)
    different = np.zeros(len(order), dtype=np.bool_)
    different |= (trial.beside_the_query(order[::-1]) != want[::-1]).any(axis=1)[::-1]
    different |= (trial.on_the_cache(order) != want).any(axis=1)
    for index in (0, -1):
        different[index] |= (trial.beside_the_query(order[[index]]) != want[index]).any()
    if different.any():
        raise ConfigError(
            f"--deterministic: on this machine the scores of {different.sum()} of {len(order)} "
            "items depend on the batch that they are in; another number of --threads may help"
        )


def _trial(backend: Backend) -> _Trial:
    """Return a trial of random tokens; the query is longer than one chunk if that fits a batch."""
    limits = backend.limits
    room = limits.max_tokens // 3
    lengths = [
        length
        for length, so_far in zip(ITEM_LENGTHS, accumulate(ITEM_LENGTHS), strict=True)
        if so_far <= room and 2 * length <= limits.max_model_len
    ]
    longest = min(room, limits.max_model_len - max(lengths), limits.deterministic_chunk * 5 // 4)
    rng = np.random.default_rng(0)

    def tokens(count: int) -> Int32Array:
        return rng.integers(0, limits.vocab_rows, count).astype(np.int32)

    labels = rng.integers(0, limits.label_rows, 3).astype(np.int32)

    others = tuple(tokens(1 + index % 5) for index in range(len(lengths) + 1))
    return _Trial(backend, tokens(longest), tuple(map(tokens, lengths)), others, labels)
