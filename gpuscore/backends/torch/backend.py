"""`TorchBackend`: batches on a CPU or CUDA device, in order, on a thread of its own."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.base import OutOfMemory
from gpuscore.backends.torch.attention import ExtendAttention
from gpuscore.backends.torch.compiler import compiled, eagerly
from gpuscore.backends.torch.deterministic import TILING
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.loader import load_weights
from gpuscore.backends.torch.models.decoder import Decoder
from gpuscore.backends.torch.plan import BackendPlan
from gpuscore.backends.torch.tiles import all_at_once, in_tiles
from gpuscore.backends.torch.warmup import warmup_batches
from gpuscore.types import BackendLimits, Float32Array, PackedBatch, RowScores
from gpuscore_kernels.label_head import label_logits, vocab_statistics
from gpuscore_kernels.partial_attention import merge_partials
from gpuscore_kernels.partial_attention.api import Implementation


class TorchBackend:
    """Implements `Backend`; `plan` says what to load and how large."""

    def __init__(self, plan: BackendPlan) -> None:
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        self.plan = plan
        self.device = plan.device
        compiler = compiled if plan.compile else eagerly
        weights = load_weights(Path(plan.directory), plan.family, plan.dtype, plan.device)
        self.tiling = TILING if plan.limits.deterministic_chunk else None
        self._by_rows = in_tiles(self.tiling.rows) if self.tiling else all_at_once
        self.decoder = Decoder(plan.family.config, weights, compiler, self._by_rows)
        self._merge = compiler(merge_partials)
        self.pool = KVPool(
            plan.family.config,
            plan.limits.num_pages,
            plan.limits.page_size,
            plan.dtype,
            plan.device,
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-backend")

    @property
    def limits(self) -> BackendLimits:
        return self.plan.limits

    def warmup(self) -> None:
        """Run full batches of every layout, and a single row: lazy set-up before traffic."""
        longest = min(self.limits.max_tokens, self.limits.max_model_len)
        for batch in warmup_batches(longest, self.limits.page_size):
            self.collect(self.extend(batch))

    def extend(self, batch: PackedBatch) -> Future[RowScores]:
        return self._thread.submit(self._run, batch)

    def collect(self, pending: Future[RowScores]) -> RowScores:
        return pending.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

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
        impl: Implementation = "cpu" if self.device.type == "cpu" else "reference"
        attend = ExtendAttention(
            batch, self.decoder.config, self.pool, impl, self._merge, self.tiling
        )
        hidden = self.decoder.forward(
            self._to_device(batch.token_ids),
            self._to_device(batch.positions),
            self._to_device(batch.score_rows),
            attend,
        )
        return self._label_head(hidden, batch)

    def _label_head(self, hidden: Tensor, batch: PackedBatch) -> RowScores:
        head, cap = self.decoder.weights.lm_head, self.decoder.config.final_softcap
        label_rows = np.repeat(np.arange(len(batch.score_rows)), np.diff(batch.cu_labels))
        (logits,) = self._by_rows(
            lambda rows, ids: (label_logits(hidden, head, rows, ids, softcap=cap),),
            self._to_device(label_rows),
            self._to_device(batch.label_token_ids),
        )
        wanted = np.flatnonzero(batch.need_lse | batch.need_top)
        if len(wanted) == 0:
            return RowScores(_numpy(logits), lse=None, top_ids=None)
        some_lse, *top = self._by_rows(
            lambda rows: _without_none(
                vocab_statistics(rows, head, need_top=batch.need_top, softcap=cap)
            ),
            hidden.index_select(0, self._to_device(wanted)),
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
