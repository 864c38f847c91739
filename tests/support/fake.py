"""A backend without a model, as cheap as possible.

Every token has a value that depends on its id and its position; a prompt's hash is the sum of its
tokens' values (mod 2^64). The backend adds up three parts with prefix sums: the values that it
stored in the slots of the cached prefix, the ancestors' rows and the segment's rows. Tests add
up the whole prompt. They agree only if the engine's pages, parents, positions, rows and labels
are right, whatever the packing, the chunks and the cache.
"""

import time

import numpy as np
from numpy.typing import NDArray

from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores

U64 = NDArray[np.uint64]
VOCAB = 32_000
MAX_MODEL_LEN = 32_768
LOGIT_RANGE = np.float32(8)  # logits lie in [-8, 0), log-sum-exps in [0, 1)

_MIX = np.uint64(0x9E3779B97F4A7C15)
_LABEL = np.uint64(0xD1B54A32D192ED03)
_WEIGHTS = np.random.default_rng(20).integers(1, 2**63, MAX_MODEL_LEN, dtype=np.uint64) * np.uint64(
    2
)
_WEIGHTS += np.uint64(1)


def token_values(token_ids: NDArray[np.integer], positions: NDArray[np.integer]) -> U64:
    """Return the value that each token adds to its prompt's hash."""
    return (token_ids.astype(np.uint64) + np.uint64(1)) * _WEIGHTS[positions]


def logits_of(hashes: U64, labels: NDArray[np.integer]) -> NDArray[np.float32]:
    mixed = _mixed(hashes + (labels.astype(np.uint64) + np.uint64(1)) * _LABEL)
    return (mixed.astype(np.float32) * np.float32(2**-24) - np.float32(1)) * LOGIT_RANGE


def lse_of(hashes: U64) -> NDArray[np.float32]:
    return _mixed(hashes).astype(np.float32) * np.float32(2**-24)


def _mixed(values: U64) -> U64:
    """Return 24 well-mixed bits of each value, which are exact in float32."""
    mixed = (values ^ (values >> np.uint64(32))) * _MIX
    return (mixed ^ (mixed >> np.uint64(29))) * _MIX >> np.uint64(40)


class FakeBackend:
    """Computes a batch inside `extend`; `collect` waits until a simulated device would be done.

    Args:
        max_tokens, page_size, num_pages: its limits.
        batch_us, token_us: microseconds that the simulated device takes for a batch and for each
            of its tokens, one batch after the other; with both 0 only the host is measured.
    """

    layers_done = 0

    def __init__(
        self,
        *,
        max_tokens: int = 16_384,
        page_size: int = 64,
        num_pages: int = 16_384,
        batch_us: float = 0.0,
        token_us: float = 0.0,
    ) -> None:
        self.limits = BackendLimits(max_tokens, page_size, num_pages, MAX_MODEL_LEN, VOCAB)
        self._batch, self._token = batch_us * 1e-6, token_us * 1e-6
        self._device_free = 0.0  # time at which the simulated device is done
        # A slot that was never written holds a value that spoils the sum.
        self._slots = np.full(page_size * num_pages, 0xBAD, dtype=np.uint64)

    def warmup(self) -> None:
        pass

    def extend(self, batch: PackedBatch) -> tuple[float, RowScores]:
        busy = self._batch + self._token * batch.num_tokens
        self._device_free = max(time.monotonic(), self._device_free) + busy
        return self._device_free, self._run(batch)

    def collect(self, pending: tuple[float, RowScores]) -> RowScores:
        ready, scores = pending
        if self._batch or self._token:
            time.sleep(max(0.0, ready - time.monotonic()))
        return scores

    def close(self) -> None:
        pass

    def _run(self, batch: PackedBatch) -> RowScores:
        if batch.num_tokens > self.limits.max_tokens:
            raise ValueError(f"{batch.num_tokens} tokens are over the budget")
        bounds = batch.cu_seqlens
        values = token_values(batch.token_ids, batch.positions)
        sums = np.zeros(len(values) + 1, dtype=np.uint64)
        np.cumsum(values, out=sums[1:])
        rows = batch.score_rows
        segment = np.searchsorted(bounds, rows, side="right") - 1
        hashes = sums[rows + 1] - sums[bounds[segment]]
        above = batch.parent[segment]
        while (above >= 0).any():
            whole = sums[bounds[above + 1]] - sums[bounds[above]]
            hashes += np.where(above < 0, np.uint64(0), whole)
            above = np.where(above < 0, -1, batch.parent[above])
        hashes += self._prefixes(batch)[batch.request_of[segment]]
        # Slots are written after they were read: a cached prefix must be from earlier batches.
        kept = batch.slot_mapping >= 0
        self._slots[batch.slot_mapping[kept]] = values[kept]
        per_label = np.repeat(hashes, np.diff(batch.cu_labels))
        lse = lse_of(hashes)
        lse[~batch.need_lse] = np.nan
        return RowScores(logits_of(per_label, batch.label_token_ids), lse, None, None)

    def _prefixes(self, batch: PackedBatch) -> U64:
        """Hash of every request's cached tokens, [R]."""
        hashes = np.zeros(len(batch.prefix_lens), dtype=np.uint64)
        size = self.limits.page_size
        for request in np.flatnonzero(batch.prefix_lens):
            length = int(batch.prefix_lens[request])
            pages = batch.page_table[request, : -(-length // size)]
            if (pages < 0).any():
                raise ValueError("a page of a cached prefix is missing")
            slots = self._slots.reshape(-1, size)[pages].reshape(-1)[:length]
            hashes[request] = slots.sum(dtype=np.uint64)
        return hashes
