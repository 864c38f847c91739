"""`JaxBackend`: batches on one of JAX's devices, in order, dispatched without waiting."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpuscore.backends.base import DeviceLost, OutOfMemory, Progress, unreported
from gpuscore.backends.common.batches import warmup_batches
from gpuscore.backends.common.checks import check_ids
from gpuscore.backends.common.sizing import mebibytes
from gpuscore.backends.jax.attention import Pool, PrefixPass, prefix_pass
from gpuscore.backends.jax.label_head import MANY, NOTHING, ONE
from gpuscore.backends.jax.layout import ProgramSizes, num_pages, padded
from gpuscore.backends.jax.plan import JaxPlan
from gpuscore.backends.jax.platform import keep_programs
from gpuscore.backends.jax.programs import Programs, ScoredRows, compile_programs
from gpuscore.backends.jax.weights import load_weights
from gpuscore.batch import PackedBatch, RowScores
from gpuscore.limits import BackendLimits

logger = logging.getLogger(__name__)

COMPILERS = 4  # threads


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch that was launched, with arrays that are filled once it has run; or its error."""

    batch: PackedBatch
    rows: ScoredRows | None
    labels: tuple[Array, ...]  # label logits; together [>= L]
    error: Exception | None = None


class JaxBackend:
    """Implements `Backend`.

    Args:
        plan: what to load.
        progress: called while weights are read.

    Raises:
        ConfigError: the checkpoint is damaged or leaves too little memory.
    """

    def __init__(self, plan: JaxPlan, progress: Progress = unreported) -> None:
        self.plan = plan
        if plan.compile_cache is not None:
            keep_programs(plan.compile_cache)
        self._config = plan.architecture.config
        self._prefix_pass = prefix_pass_of(plan.attention)
        self._weights = load_weights(
            Path(plan.directory),
            plan.architecture,
            plan.dtype_name,
            plan.device,
            plan.precision,
            progress,
        )
        self._sizes = plan.sizes()
        self._programs: dict[ProgramSizes, Programs] = {}
        self._rows = self._padded_rows = 0  # computed so far, and with padding
        self._limits = plan.limits(self._count_pages())
        self.pool = self._make_pool()

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    def warmup(self) -> None:
        """Compile all programs and run small batches; nothing is compiled afterwards."""
        start = time.monotonic()
        with ThreadPoolExecutor(COMPILERS) as threads:  # XLA releases the GIL while it compiles
            list(threads.map(self._program, self._sizes))
        longest = min(self.plan.max_tokens, self.plan.max_model_len)
        for batch in warmup_batches(longest, self.plan.pages.size):
            self.collect(self.extend(batch))
        logger.info(
            "compiled %d programs in %.1f s: batches of %s tokens",
            len(self._programs),
            time.monotonic() - start,
            ", ".join(str(tokens) for tokens in self._limits.token_buckets),
        )

    def extend(self, batch: PackedBatch) -> Launched:
        error = self._invalid(batch)
        if error is not None:
            return Launched(batch, None, (), error)
        programs = self._program(self._fitting(batch))
        sizes = programs.sizes
        slots = self._limits.num_pages * self._limits.page_size
        tables = padded(batch, sizes, self._limits.page_size, slots)
        wanted = np.array(_wanted(batch), np.int32)
        try:
            self.pool, rows = programs.extend(self._weights, self.pool, tables, wanted)
            labels = tuple(self._labels(programs, rows.hidden, batch))
        except RuntimeError as failure:
            raise self._meaning(failure) from failure
        self._rows += batch.num_tokens
        self._padded_rows += int(tables.every.number) * sizes.tiling.rows
        return Launched(batch, rows, labels)

    def collect(self, pending: Launched) -> RowScores:
        if pending.error is not None:
            raise pending.error
        try:
            return _scores(pending)
        except RuntimeError as failure:
            raise self._meaning(failure) from failure

    def close(self) -> None:
        if self._padded_rows:
            logger.info(
                "%d rows were computed, %.1f %% of them padding",
                self._padded_rows,
                100 * self.padding_share,
            )
        self._programs.clear()
        del self.pool, self._weights

    @property
    def padding_share(self) -> float:
        """Share of padding among the rows computed so far; batches are padded to whole tiles."""
        return 1 - self._rows / max(1, self._padded_rows)

    def _labels(self, programs: Programs, hidden: Array, batch: PackedBatch) -> Iterator[Array]:
        rows = np.repeat(np.arange(len(batch.score_rows), dtype=np.int32), np.diff(batch.cu_labels))
        for first in range(0, len(rows), programs.max_labels):
            part = slice(first, first + programs.max_labels)
            numbers = (rows[part], batch.label_token_ids[part])
            count = len(numbers[0])
            room = (0, programs.max_labels - count)
            yield programs.labels(
                hidden,
                self._weights.lm_head,
                *(np.pad(x, room) for x in numbers),
                np.array(count, np.int32),
            )

    def _invalid(self, batch: PackedBatch) -> Exception | None:
        try:
            check_ids(batch, self._limits.vocab_rows, self._limits.label_rows)
        except IndexError as error:
            return error
        if batch.num_tokens > self._sizes[-1].tokens:
            return ValueError(f"{batch.num_tokens} tokens are over the limit of a batch")
        return None

    def _fitting(self, batch: PackedBatch) -> ProgramSizes:
        pages = num_pages(batch, self._limits.page_size)
        return next(
            sizes
            for sizes in self._sizes
            if sizes.tokens >= batch.num_tokens and sizes.pages >= pages
        )

    def _program(self, sizes: ProgramSizes) -> Programs:
        if sizes not in self._programs:
            self._programs[sizes] = self._compiled(sizes, self._limits.num_pages)
        return self._programs[sizes]

    def _compiled(self, sizes: ProgramSizes, count: int) -> Programs:
        pool, device = pool_shapes(self.plan, count), self.plan.device
        return compile_programs(sizes, self._config, self._weights, pool, self._prefix_pass, device)

    def _make_pool(self) -> Pool:
        with jax.default_device(self.plan.device):
            return jax.tree.map(
                lambda side: jnp.zeros(side.shape, side.dtype),
                pool_shapes(self.plan, self._limits.num_pages),
            )

    def _count_pages(self) -> int:
        """Return the number of KV pages that fit beside the largest program; XLA tells its size."""
        plan, pages, largest = self.plan, self.plan.pages, self._sizes[-1]
        free = plan.free_memory()
        at_most = pages.count(free, 0)
        programs = self._compiled(largest, at_most)
        count = pages.count(free, programs.bytes)
        if count == at_most:  # otherwise it was compiled for a pool of another size
            self._programs[largest] = programs
        logger.info(
            "memory: weights %s, largest batch %s, KV cache %s: %d pages, %d tokens",
            mebibytes(plan.weight_bytes),
            mebibytes(programs.bytes),
            mebibytes(count * pages.page_bytes),
            count,
            count * pages.size,
        )
        return count

    def _meaning(self, failure: RuntimeError) -> Exception:
        """Return the error to raise for a failed batch, whose donated pool may be lost."""
        try:
            jax.block_until_ready(self.pool)
        except RuntimeError as error:
            return DeviceLost(f"the KV cache was lost with a batch: {error}")
        if "RESOURCE_EXHAUSTED" in str(failure):
            return OutOfMemory(str(failure))
        return failure


def pool_shapes(plan: JaxPlan, count: int) -> Any:
    """Return a pool of so many pages, as shapes."""
    config = plan.architecture.config
    shape = (config.num_layers, count, plan.pages.size, config.num_kv_heads, config.head_dim)
    dtype = jnp.dtype(plan.dtype_name)
    if plan.device.platform == "cpu" and dtype == jnp.bfloat16:
        dtype = jnp.dtype(jnp.uint16)  # see `Pool`
    side: Any = jax.ShapeDtypeStruct(shape, dtype)
    return Pool(side, side)


def prefix_pass_of(name: str) -> PrefixPass:
    if name == "pallas":
        from gpuscore.backends.jax.prefix_pallas import prefix_pass as on_tpu

        return on_tpu
    return prefix_pass


def _scores(pending: Launched) -> RowScores:
    """Return a batch's results; waits for the device."""
    batch, rows = pending.batch, pending.rows
    assert rows is not None  # noqa: S101  (only a batch with an error has none)
    count, some = len(batch.score_rows), np.empty(0, np.float32)
    logits = np.concatenate([some, *map(np.asarray, pending.labels)])[: len(batch.label_token_ids)]
    jax.block_until_ready(rows)
    if _wanted(batch) == NOTHING:
        return RowScores(logits, lse=None, top_ids=None, top_logits=None)
    wanted = batch.need_lse | (batch.num_top > 0)
    lse = np.where(wanted, np.asarray(rows.lse)[:count], np.float32(np.nan))
    if not batch.num_top:
        return RowScores(logits, lse, top_ids=None, top_logits=None)
    tops = (np.asarray(x)[:count, : batch.num_top] for x in (rows.top, rows.top_logits))
    return RowScores(logits, lse, *tops)


def _wanted(batch: PackedBatch) -> int:
    """Return the statistics over the vocabulary that a batch asks for."""
    if batch.num_top > 1:
        return MANY
    return ONE if batch.num_top or batch.need_lse.any() else NOTHING
