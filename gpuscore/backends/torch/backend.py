"""`TorchBackend`: batches on a CPU or CUDA device, in order, on a thread of its own."""

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.base import OutOfMemory
from gpuscore.backends.torch.attention_backends import attention_factory
from gpuscore.backends.torch.compiler import compiled, eagerly
from gpuscore.backends.torch.deterministic import TILING
from gpuscore.backends.torch.kernels import in_triton
from gpuscore.backends.torch.known_answer import check_kernels, check_known_answer
from gpuscore.backends.torch.kv_pool import KeptRows, KVPool
from gpuscore.backends.torch.loader import load_weights
from gpuscore.backends.torch.memory import Memory, memory_of
from gpuscore.backends.torch.models.decoder import Decoder
from gpuscore.backends.torch.plan import BackendPlan
from gpuscore.backends.torch.sizing import measure, mebibytes, shortened
from gpuscore.backends.torch.tiles import all_at_once, in_tiles
from gpuscore.backends.torch.warmup import largest_batches, warmup_batches
from gpuscore.errors import ConfigError
from gpuscore.types import BackendLimits, Float32Array, PackedBatch, RowScores
from gpuscore_kernels.label_head import label_logits, vocab_statistics
from gpuscore_kernels.label_head.api import Implementation as HeadImplementation
from gpuscore_kernels.partial_attention import merge_partials

logger = logging.getLogger(__name__)


class TorchBackend:
    """Implements `Backend`.

    Args:
        plan: what to load.
        memory: tells how many pages there is room for; None = that of the plan's device.

    Raises:
        ConfigError: a damaged checkpoint, or one that leaves too little memory, or an attention
            backend that computes something else than the reference.
    """

    def __init__(self, plan: BackendPlan, memory: Memory | None = None) -> None:
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        self.plan = plan
        self.device = plan.device
        compiler = in_triton if plan.kernels else compiled if plan.compile else eagerly
        self._own: HeadImplementation = "triton" if plan.kernels else "reference"
        config = plan.family.config
        weights = load_weights(Path(plan.directory), plan.family, plan.dtype, plan.device)
        self.tiling = TILING if plan.deterministic else None
        self._by_rows = in_tiles(self.tiling.rows) if self.tiling else all_at_once
        self._attention = attention_factory(
            plan.attention,
            config,
            plan.device,
            plan.dtype,
            compiler(merge_partials),
            self.tiling,
        )
        if plan.attention != "torch":  # which is what the others are compared with
            check_known_answer(
                plan.attention,
                self._attention,
                config,
                plan.dtype,
                plan.device,
                plan.pages.size,
            )
        if plan.kernels:
            check_kernels(config, weights)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-backend")
        try:
            # Only for the measurement: a few layers and a single page.
            self.decoder = Decoder(*shortened(config, weights), compiler, self._by_rows, self._own)
            self.pool = self._make_pool(1)
            num_pages = self._count_pages(memory or memory_of(plan.device))
            self.decoder = Decoder(config, weights, compiler, self._by_rows, self._own)
            self.pool = self._make_pool(num_pages)
        except BaseException:
            self.close()
            raise
        self._limits = plan.limits(num_pages)

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    def warmup(self) -> None:
        """Run small batches of every layout: lazy set-up before traffic."""
        self._run_all(warmup_batches(self._longest, self.plan.pages.size))

    def extend(self, batch: PackedBatch) -> Future[RowScores]:
        return self._thread.submit(self._run, batch)

    def collect(self, pending: Future[RowScores]) -> RowScores:
        return pending.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def _longest(self) -> int:
        """Tokens of the longest segment."""
        return min(self.plan.max_tokens, self.plan.max_model_len)

    def _make_pool(self, num_pages: int) -> KVPool:
        plan = self.plan
        return KVPool(self.decoder.config, num_pages, plan.pages.size, plan.dtype, plan.device)

    def _count_pages(self, memory: Memory) -> int:
        plan, pages = self.plan, self.plan.pages
        self.warmup()  # what stays for good is no part of a batch
        batches = largest_batches(plan.max_tokens, plan.max_model_len, pages.size)
        try:
            found = measure(memory, partial(self._run_all, batches))
        except OutOfMemory as error:
            raise ConfigError(
                f"a batch of --max-batch-tokens {plan.max_tokens} does not fit into the memory "
                f"beside {mebibytes(plan.weight_bytes)} of weights; lower --max-batch-tokens"
            ) from error
        num_pages = pages.count(found.free, found.batch)
        logger.info(
            "memory: weights %s, largest batch %s (%s), KV cache %s: %d pages, %d tokens",
            mebibytes(plan.weight_bytes),
            mebibytes(found.batch),
            "estimated" if found.estimated else "measured",
            mebibytes(num_pages * pages.page_bytes),
            num_pages,
            num_pages * pages.size,
        )
        return num_pages

    def _run_all(self, batches: Iterable[PackedBatch]) -> None:
        for batch in batches:
            self.collect(self.extend(batch))

    def _run(self, batch: PackedBatch) -> RowScores:
        try:
            return self._forward(batch)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemory(str(error)) from error
        except RuntimeError as error:
            if "not enough memory" not in str(error):  # what torch's CPU allocator says
                raise
            raise OutOfMemory(str(error)) from error

    @torch.inference_mode()
    def _forward(self, batch: PackedBatch) -> RowScores:
        attention = self._attention(self.decoder.config, self.pool).plan(batch)
        hidden = self.decoder.forward(
            self._to_device(batch.token_ids),
            self._to_device(batch.positions),
            self._to_device(batch.score_rows),
            attention.run,
            KeptRows.of(batch.slot_mapping, self.pool),
        )
        return self._label_head(hidden, batch)

    def _label_head(self, hidden: Tensor, batch: PackedBatch) -> RowScores:
        head, cap = self.decoder.weights.lm_head, self.decoder.config.final_softcap
        label_rows = np.repeat(np.arange(len(batch.score_rows)), np.diff(batch.cu_labels))
        (logits,) = self._by_rows(
            lambda rows, ids: (label_logits(hidden, head, rows, ids, softcap=cap, impl=self._own),),
            self._to_device(label_rows),
            self._to_device(batch.label_token_ids),
        )
        wanted = np.flatnonzero(batch.need_lse | batch.need_top)
        if len(wanted) == 0:
            return RowScores(_numpy(logits), lse=None, top_ids=None)
        some_lse, *top = self._by_rows(
            lambda rows: _without_none(
                vocab_statistics(
                    hidden, head, rows, need_top=batch.need_top, softcap=cap, impl=self._own
                )
            ),
            self._to_device(wanted),
        )
        lse = np.full(len(batch.score_rows), np.nan, dtype=np.float32)
        lse[wanted] = _numpy(some_lse)
        top_ids = top[0].cpu().numpy().astype(np.int32) if top else None
        return RowScores(_numpy(logits), lse, top_ids)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)


def _without_none(values: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(value for value in values if value is not None)


def _numpy(values: Tensor) -> Float32Array:
    return values.float().cpu().numpy()
