"""A backend without a model that remembers which token stands in which KV slot.

For every scored row it reads back the whole prompt through the page table, its ancestors and the
segment, and computes its "logits" from that prompt. A wrong page, parent, position or label
therefore changes a score, which the tests compare with the same function of the request.
"""

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores, lineage


def tape_logit(prompt: Sequence[int], label: int) -> np.float32:
    """Return the tape's logit for a label after a prompt."""
    digest = zlib.crc32(np.asarray([*prompt, label], dtype=np.int32).tobytes())
    return np.float32(digest % 100003) / np.float32(1000)


def tape_lse(prompt: Sequence[int]) -> np.float32:
    return np.float32(200) + tape_logit(prompt, -1)


class TapeBackend:
    """A backend that runs batches at `collect`, in order; `gate` delays them and `fault` fails
    them."""

    layers_done = 0

    def __init__(
        self,
        *,
        max_tokens: int = 32,
        page_size: int = 4,
        num_pages: int = 64,
        max_model_len: int = 512,
        gate: threading.Event | None = None,
        fault: Callable[[int], Exception | None] = lambda step: None,
    ) -> None:
        self.limits = BackendLimits(max_tokens, page_size, num_pages, max_model_len, 1000)
        self.batches: list[PackedBatch] = []
        self.gate, self.fault = gate, fault
        self.closed = False
        self.slots = np.full((page_size * num_pages, 2), -7)  # (token, position)

    def warmup(self) -> None:
        pass

    def extend(self, batch: PackedBatch) -> "Future[RowScores]":
        self.batches.append(batch)
        step = len(self.batches) - 1
        future: Future[RowScores] = Future()
        error = self.fault(step)
        if error is None:
            future.set_result(self.run(batch))
        else:
            future.set_exception(error)
        return future

    def collect(self, pending: "Future[RowScores]") -> RowScores:
        if self.gate is not None:
            self.gate.wait(timeout=30)
        return pending.result()

    def close(self) -> None:
        self.closed = True

    def run(self, batch: PackedBatch) -> RowScores:
        """Return a batch's scores, and keep its tokens."""
        assert batch.num_tokens <= self.limits.max_tokens, "over the token budget"
        bounds, tokens = batch.cu_seqlens, batch.token_ids
        segment_of = np.repeat(np.arange(len(batch.parent)), np.diff(bounds))
        # Read before writing: a batch must read from pages only what earlier batches wrote.
        prompts = [self._prompt(batch, segment_of[row], row) for row in batch.score_rows]
        kept = batch.slot_mapping >= 0
        assert len(np.unique(batch.slot_mapping[kept])) == kept.sum(), "two tokens in one slot"
        self.slots[batch.slot_mapping[kept]] = np.stack(
            [tokens[kept], batch.positions[kept]], axis=1
        )
        logits = [
            tape_logit(prompt, int(label))
            for prompt, start, stop in zip(
                prompts, batch.cu_labels[:-1], batch.cu_labels[1:], strict=True
            )
            for label in batch.label_token_ids[start:stop]
        ]
        lse = np.array([tape_lse(prompt) for prompt in prompts], dtype=np.float32)
        lse[~batch.need_lse] = np.nan
        return RowScores(np.array(logits, dtype=np.float32), lse, None, None)

    def _prompt(self, batch: PackedBatch, segment: int, row: int) -> list[int]:
        """Return all visible tokens in order, after a check of their positions."""
        request = batch.request_of[segment]
        index = np.arange(batch.prefix_lens[request])
        pages = batch.page_table[request, index // self.limits.page_size]
        assert (pages >= 0).all(), "a page is missing"
        cached = self.slots[pages * self.limits.page_size + index % self.limits.page_size]
        rows = []
        for ancestor in lineage(batch, segment):
            assert batch.request_of[ancestor] == request
            rows += range(batch.cu_seqlens[ancestor], batch.cu_seqlens[ancestor + 1])
        rows += range(batch.cu_seqlens[segment], row + 1)
        positions = [*cached[:, 1], *batch.positions[rows]]
        assert positions == list(range(len(positions))), "positions do not count from 0"
        return [*cached[:, 0], *batch.token_ids[rows]]
