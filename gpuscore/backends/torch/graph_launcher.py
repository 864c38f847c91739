"""Forward passes with one copy in and one copy out; small batches run as CUDA graphs.

Launching about 300 kernels one by one takes the host several milliseconds. A large batch hides that
time, a small one does not. A CUDA graph launches all of them at once, but always reads the same
memory. So a batch, with its tile tables, is written as int32 words into one buffer, in an order
that depends on the batch's sizes only. It is padded to the next larger sizes that have a graph
(`buckets`). Padding is never attended to, stored or scored.

While the device runs one batch, the next one is planned and queued (`queues`). Only the function
that `launch` returns waits for the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.torch.attention.tiled import TritonAttention
from gpuscore.backends.torch.batch_words import (
    Places,
    PlannedBatch,
    arrays_of,
    write,
    write_head,
)
from gpuscore.backends.torch.buckets import Bucket, filled_batch, find_bucket
from gpuscore.backends.torch.decoder import Decoder, ForwardContext
from gpuscore.backends.torch.delta_net.layer import DeltaNetBackend
from gpuscore.backends.torch.kv_pool import KeptRows
from gpuscore.backends.torch.launcher import Finish, Launcher, row_scores
from gpuscore.backends.torch.queues import Queue, Replay
from gpuscore.backends.torch.words import WordPlaces, exact
from gpuscore.errors import ConfigError
from gpuscore.types.batch import Int32Array, PackedBatch, RowScores
from gpuscore_kernels.label_head import label_logits, vocab_statistics

if TYPE_CHECKING:  # it needs Triton
    from gpuscore.backends.torch.attention.fa4 import HopperAttention

# An attention backend whose tables are int32 words in the buffer; only it knows their meaning.
TableAttention: TypeAlias = "TritonAttention | HopperAttention"
GRAPH_WORDS = 2**20  # the most words of a batch that runs as a graph
IN_FLIGHT = 2  # batches at a time: one runs, the next is queued
# The largest relative error between two correct kernels; that of most is several times smaller.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(slots=True)
class Buffers:
    """Host memory of one batch from its launch until it is collected."""

    host: Tensor  # int32
    words: Int32Array  # a view of `host`
    answer: Tensor  # float32


class GraphLauncher(Launcher):
    """Forward passes of one model over one pool, with Triton kernels.

    Args:
        decoder: a decoder with Triton kernels that computes all rows at once.
        attention: attention over the pool of keys and values.
        linear: the linear layers, if the model has any.
        queue: the device's queue of copies and launches.
        graph_tokens: batches of up to this many tokens run as graphs; 0 = none.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: TableAttention,
        linear: DeltaNetBackend | None,
        *,
        queue: Queue,
        graph_tokens: int,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.queue = queue
        self.linear = linear
        self.pool = attention.pool
        self.buckets = attention.buckets(graph_tokens)
        self.replayed = 0  # batches that ran as graphs
        self.launched = 0  # batches that ran as single launches
        self._graphs: dict[Bucket, Replay] = {}
        self._places_of = {
            bucket: Places.of(
                bucket,
                attention.places,
                () if linear is None else linear.table_specs(bucket.tokens, bucket.scored),
            )
            for bucket in self.buckets
        }
        # All batches share these words: a batch is uploaded after the one before has run.
        self._words = self._device_words(GRAPH_WORDS)
        weight = self.decoder.weights.lm_head
        self._hidden = weight.new_empty(graph_tokens, weight.shape[1])
        self._free: list[Buffers] = []
        self._planned: PlannedBatch | None = None  # the batch that `is_quick` was asked about

    @torch.inference_mode()
    def reserve(self, batches: Iterable[PackedBatch]) -> None:
        """Allocate the buffers of all batches in flight, large enough for each of `batches`.

        This is done at start, because pinning memory waits for the device.
        """
        words = answers = 0
        for batch in batches:
            words = max(words, self._plan(batch).num_words)
            statistics = (1 + 2 * batch.num_top) * len(batch.score_rows)
            answers = max(answers, len(batch.label_token_ids) + statistics)
        for _ in range(IN_FLIGHT):
            self._free.append(self._make_buffers(words, answers))

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture all graphs that are missing, the largest first: the others can reuse its memory.

        No graph is captured twice, because its first capture would be destroyed while other graphs
        exist (`Queue.capture`). Return how many were captured.
        """
        missing = [bucket for bucket in reversed(self.buckets) if bucket not in self._graphs]
        for bucket in missing:
            self._capture(bucket)
        return len(missing)

    @torch.inference_mode()
    def capture_largest(self) -> None:
        if self.buckets:
            self._capture(self.buckets[-1])

    def release(self) -> None:
        self._graphs.clear()

    def is_quick(self, batch: PackedBatch) -> bool:
        if not self._graphs or batch.num_tokens > self.buckets[-1].tokens:
            return False
        self._planned = self._plan(batch)
        return self._planned.replay is not None

    @torch.inference_mode()
    def launch(self, batch: PackedBatch) -> Finish:
        planned = self._planned
        self._planned = None
        if planned is None or planned.batch is not batch:
            planned = self._plan(batch)
        buffers = self._free.pop() if self._free else None
        if buffers is None or len(buffers.words) < planned.num_words:
            buffers = self._make_buffers(planned.num_words, 0)
        try:
            return self._launch(planned, buffers)
        except BaseException:
            self.queue.wait()  # until nothing uses the buffers
            self._free.append(buffers)  # otherwise the next batch would pin new ones
            raise

    def _launch(self, planned: PlannedBatch, buffers: Buffers) -> Finish:
        end = write(planned, buffers.words)
        head = write_head(planned.batch, buffers.words, end)
        end = head.end
        words = self._words[:end] if end <= GRAPH_WORDS else self._device_words(end)
        self.queue.upload(buffers.host[:end], words)
        if planned.replay is not None:
            planned.replay()
            hidden = self._hidden
            self.replayed += 1
        else:
            hidden = self._forward(planned.places, words)
            self.launched += 1
        return self._answer(planned.batch, hidden, words, head, buffers)

    def _plan(self, batch: PackedBatch) -> PlannedBatch:
        tables: list[Any] = self.attention.tables(batch)
        states = [] if self.linear is None else self.linear.tables(batch)
        arrays = *arrays_of(batch), *states
        parts = batch, arrays, tables, self.attention.list_words(tables)
        sizes = Bucket(batch.num_tokens, self.attention.tiles(tables), len(batch.score_rows))
        bucket = find_bucket(self.buckets, sizes)
        if bucket is not None and bucket in self._graphs:
            planned = PlannedBatch(*parts, self._places_of[bucket], self._graphs[bucket])
            if planned.places.arrays.hold(arrays) and planned.num_words <= GRAPH_WORDS:
                return planned
        return PlannedBatch(*parts, Places.of(sizes, self.attention.places, exact(states)))

    def _make_buffers(self, words: int, answers: int) -> Buffers:
        size = 1 << max(14, (words - 1).bit_length())
        host = self.queue.host(size, torch.int32)
        return Buffers(host, host.numpy(), self.queue.host(answers, torch.float32))

    def _device_words(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=self.queue.device)

    def _capture(self, bucket: Bucket) -> None:
        """Capture a graph, and compare its first replay with kernels launched one by one."""
        places = self._places_of[bucket]
        scored = self._write_known(bucket, places)

        def run() -> None:
            hidden = self._forward(places, self._words)
            self._hidden[: bucket.scored].copy_(hidden)

        replay = self.queue.capture(run)
        hidden = self._hidden[:scored]
        launched = hidden.clone()
        hidden.fill_(torch.nan)
        replay()
        check_replay(bucket.tokens, hidden, launched)
        self._graphs[bucket] = replay

    def _write_known(self, bucket: Bucket, places: Places) -> int:
        """Upload a batch that fills the bucket; return the number of its scored rows."""
        batch = filled_batch(
            bucket.tokens, bucket.scored, self.decoder.config.vocab_size, self.pool.page_size
        )
        planned = self._plan(batch)._replace(places=places)
        words = np.empty(planned.num_words, np.int32)
        end = write(planned, words)
        self._words[:end].copy_(torch.from_numpy(words[:end]))
        return len(batch.score_rows)

    def _forward(self, places: Places, words: Tensor) -> Tensor:
        """Return the hidden states of the scored rows after the final norm."""
        token_ids, positions, slots, scored, counts, *states = places.arrays.views(words)
        attention = self.attention.on_device(places.tables, words)
        empty = words[:0]
        context = ForwardContext(
            attention,
            KeptRows(self.pool, empty, empty, slots, read=attention.read),
            None if self.linear is None else self.linear.planned(states),
            num_tokens=counts[:1],
            num_scored=counts[1:],
        )
        return self.decoder(token_ids, positions, scored, context)

    def _answer(
        self,
        batch: PackedBatch,
        hidden: Tensor,
        words: Tensor,
        head: WordPlaces,
        buffers: Buffers,
    ) -> Finish:
        """Queue the label head and the copy of its results to the host."""
        weight = self.decoder.weights.lm_head
        cap = self.decoder.config.final_softcap
        rows, label_ids, statistics_rows = head.views(words)
        parts = [label_logits(hidden, weight, rows, label_ids, softcap=cap, impl="triton")]
        if statistics_rows.shape[0]:  # `len` of a tensor is slower
            lse, top_ids, top_logits = vocab_statistics(
                hidden, weight, statistics_rows, num_top=batch.num_top, softcap=cap, impl="triton"
            )
            parts.append(lse)
            if top_ids is not None and top_logits is not None:
                parts += [top_ids.int().view(torch.float32).reshape(-1), top_logits.reshape(-1)]
        answer = parts[0] if len(parts) == 1 else torch.cat(parts)
        ends = [0, *accumulate([part.shape[0] for part in parts])]
        if buffers.answer.shape[0] < ends[-1]:
            buffers.answer = self.queue.host(2 * ends[-1], torch.float32)
        received = buffers.answer[: ends[-1]]
        wait = self.queue.download(answer, received)

        def finish() -> RowScores:  # holds no device memory, so that the next batch can use it
            wait()
            try:
                values = received.numpy().copy()
            finally:
                self._free.append(buffers)
            logits, *others = (values[a:b] for a, b in pairwise(ends))
            if len(others) > 1:
                others[1] = others[1].view(np.int32)
            return row_scores(batch, logits, others)

        return finish


def check_replay(tokens: int, replayed: Tensor, launched: Tensor) -> None:
    """Raise ConfigError if a CUDA graph computed other numbers than single launches.

    Args:
        tokens: the tokens of the graph, for the error.
        replayed, launched: hidden states of the same rows, [M, hidden].
    """
    # Random tokens may overflow in half precision: these numbers count as zeros on both sides.
    got, expected = (x.float().nan_to_num(0.0, 0.0, 0.0) for x in (replayed, launched))
    error = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    tolerance = TOLERANCE[launched.dtype]
    if not error <= tolerance:
        raise ConfigError(
            f"the CUDA graph for {tokens} tokens does not compute the same as its kernels launched "
            f"one by one: the relative error is {error:.1e} (allowed: {tolerance:.0e}); choose "
            f"--cuda-graph-tokens 0"
        )
