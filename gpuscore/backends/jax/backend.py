"""`JaxBackend`: batches on one of JAX's devices, in order, dispatched without waiting."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpuscore.backends.base import DeviceLost, OutOfMemory
from gpuscore.backends.common.batches import warmup_batches
from gpuscore.backends.common.plan import mebibytes
from gpuscore.backends.common.start_check import (
    IN_EIGHT_BITS,
    MOST_ROWS,
    KnownRequests,
    Reference,
    Run,
    check_start,
)
from gpuscore.backends.jax.attention import Attend, Pool, XlaAttend
from gpuscore.backends.jax.launched import LaunchedPart, joined, split, statistics_of
from gpuscore.backends.jax.layout import ProgramSizes, page_entries, product_tiles
from gpuscore.backends.jax.padding import padded
from gpuscore.backends.jax.plan import JaxPlan
from gpuscore.backends.jax.platform import as_config_error, kept_programs
from gpuscore.backends.jax.programs import (
    ProgramModel,
    Programs,
    ScoredRows,
    compile_programs,
)
from gpuscore.backends.jax.start_check import reference_scores
from gpuscore.backends.jax.weights import KeptBytes, load_weights
from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores

logger = logging.getLogger(__name__)

COMPILERS = 4  # threads that compile programs
CHECKED = 512  # the start check runs a program for at least so many tokens
WORTH_IT = 1.05  # the largest program is compiled again for more than 5 % more pages


class JaxBackend:
    """Implements `Backend`.

    Args:
        plan: what to load.

    Attributes:
        programs: the programs that were compiled so far.

    Raises:
        ConfigError: the checkpoint is damaged or leaves too little memory.
    """

    layers_done = 0  # a batch is one program

    def __init__(self, plan: JaxPlan) -> None:
        self.plan = plan
        self._kept = kept_programs()
        self._config = plan.architecture.config
        self._attends = attends_of(plan.attention)
        with as_config_error(f"weights of {mebibytes(plan.weight_bytes)}", "a smaller model"):
            self._weights = load_weights(
                Path(plan.directory),
                plan.architecture,
                plan.dtype_name,
                device=plan.device,
                precision=plan.precision,
            )
        self._sizes = plan.sizes()
        self.programs: dict[ProgramSizes, Programs] = {}
        self._rows = self._padded_rows = 0  # rows computed so far, without and with padding
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
        if self.plan.device_name != "cpu":  # on a CPU, the tests compare XLA with the reference
            self.check_start()
        longest = min(self.plan.max_tokens, self.plan.max_model_len)
        for batch in warmup_batches(longest, self.plan.pages.size):
            self.collect(self.extend(batch))
        logger.info(
            "compiled %d programs in %.1f s: batches of %s tokens",
            len(self.programs),
            time.monotonic() - start,
            ", ".join(str(tokens) for tokens in self._limits.token_buckets),
        )

    def check_start(self) -> None:
        """Raise ConfigError if programs compute other scores than the reference."""
        plan = self.plan
        vocab = self._limits.vocab_rows
        known = KnownRequests(vocab, self._limits.label_rows, plan.pages.size)
        sizes = next((s for s in self._sizes if s.tokens >= CHECKED), plan.size(CHECKED))

        def chosen(batch: PackedBatch) -> RowScores:
            return self._launched(batch, statistics_of(batch), sizes).scores()

        def plainly(dtype: Any) -> Run:
            return partial(
                reference_scores, weights=self._weights, config=self._config, dtype=dtype
            )

        dtype = jnp.dtype(plan.dtype_name)
        rounded = None if dtype == jnp.float32 else plainly(dtype)
        reference = Reference(plainly(jnp.float32), rounded)
        if plan.precision == "int8":
            reference = reference._replace(absolute=IN_EIGHT_BITS, row_fraction=MOST_ROWS)
        choice = f"--attention {plan.attention} with --backend jax"
        check_start(choice, known, chosen, reference)

    def extend(self, batch: PackedBatch) -> tuple[LaunchedPart, ...]:
        entries = page_entries(batch.prefix_lens, self._sizes[-1].tiling, self._limits.page_size)
        statistics = statistics_of(batch)
        try:
            parts = split(batch, entries, self._sizes[-1].pages)
            return tuple(self._launched(x, statistics, self._smallest_sizes(x)) for x in parts)
        except RuntimeError as failure:
            raise self._meaning(failure) from failure

    def collect(self, pending: tuple[LaunchedPart, ...]) -> RowScores:
        try:
            return joined([part.scores() for part in pending])
        except RuntimeError as failure:
            raise self._meaning(failure) from failure

    def close(self) -> None:
        if self._padded_rows:
            logger.info(
                "%d rows were computed, %.1f %% of them padding",
                self._padded_rows,
                100 * self.padding_fraction,
            )
        self.programs.clear()
        del self.pool, self._weights

    @property
    def padding_fraction(self) -> float:
        """Fraction of padding in the rows computed so far; batches are padded to whole tiles."""
        return 1 - self._rows / max(1, self._padded_rows)

    def _launched(self, batch: PackedBatch, statistics: int, sizes: ProgramSizes) -> LaunchedPart:
        """Launch a program on a batch that fits it, and the copies of its results to the host."""
        programs = self._program(sizes)
        buffer = padded(batch, programs.sizes, self._limits.page_size, statistics)
        self.pool, rows = programs.extend(self._weights, self.pool, buffer)
        part = LaunchedPart(batch, statistics, rows, tuple(self._labels(programs, rows, batch)))
        for result in part.read():
            result.copy_to_host_async()
        tiling = programs.sizes.tiling
        counts = (count for _, count in product_tiles(batch.num_tokens, tiling))
        self._rows += batch.num_tokens
        self._padded_rows += sum(map(mul, counts, tiling.product_rows))
        return part

    def _labels(
        self, programs: Programs, scored: ScoredRows, batch: PackedBatch
    ) -> Iterator[Array]:
        """Yield label logits: first those that the program computed, then the others."""
        if len(batch.label_token_ids):
            yield scored.labels
        step = programs.max_labels
        rows = batch.label_rows
        for first in range(programs.sizes.labels, len(rows), step):
            label_ids = batch.label_token_ids[first : first + step]
            count = len(label_ids)
            buffer = np.zeros(1 + 2 * step, np.int32)
            buffer[0] = count
            buffer[1 : 1 + count] = rows[first : first + step]
            buffer[1 + step : 1 + step + count] = label_ids
            yield programs.labels(scored.hidden, self._weights.lm_head, buffer)

    def _smallest_sizes(self, batch: PackedBatch) -> ProgramSizes:
        """Return the smallest program that a batch fits."""
        lens = batch.prefix_lens[np.unique(batch.request_of)]
        return next(
            sizes
            for sizes in self._sizes
            if sizes.tokens >= batch.num_tokens
            and sizes.pages >= page_entries(lens, sizes.tiling, self._limits.page_size).sum()
        )

    def _program(self, sizes: ProgramSizes) -> Programs:
        if sizes not in self.programs:
            self.programs[sizes] = self._compiled(sizes, self._limits.num_pages)
        return self.programs[sizes]

    def _compiled(self, sizes: ProgramSizes, count: int) -> Programs:
        pool = pool_shapes(self.plan, count)
        plan = self.plan
        with as_config_error(
            f"the program for batches of {sizes.tokens} tokens, with {count} pages of "
            f"{mebibytes(plan.pages.page_bytes)}",
            "lower --max-batch-tokens or --kv-cache-size",
        ):
            model = ProgramModel(self._config, self._weights, pool, self._attends, heads=plan.heads)
            return compile_programs(sizes, model, plan.device)

    def _make_pool(self) -> Pool:
        count = self._limits.num_pages
        what = f"{count} pages of {mebibytes(self.plan.pages.page_bytes)}"
        with (
            as_config_error(what, "lower --memory-fraction or --kv-cache-size"),
            jax.default_device(self.plan.device),
        ):
            pool: Pool = jax.tree.map(
                lambda side: jnp.zeros(side.shape, side.dtype), pool_shapes(self.plan, count)
            )
            return jax.block_until_ready(pool)

    def _count_pages(self) -> int:
        """Return the number of KV pages that fit beside the largest program.

        A program is compiled for a number of pages, and only then does XLA report its size. So the
        size is taken from an earlier start, or estimated. If the estimate is far off, the program
        is compiled again.
        """
        plan = self.plan
        largest = self._sizes[-1]
        free = plan.free_memory()
        identity = plan.program_identity(largest)
        kept = KeptBytes(self._kept, identity)
        size = kept.read() or plan.estimated_bytes(largest)
        count = plan.count_pages(free, size, estimated=True)
        programs = self._compiled(largest, count)
        fits = plan.count_pages(free, programs.bytes)
        if not count <= fits <= count * WORTH_IT:
            size = programs.bytes
            count = fits
            programs = self._compiled(largest, count)
        self.programs[largest] = programs
        kept.write(size)  # so that the next start has the same number of pages
        logger.info(
            "memory: weights %s, largest batch %s, KV cache %s",
            mebibytes(plan.weight_bytes),
            mebibytes(programs.bytes),
            plan.pages.describe(count),
        )
        return count

    def _meaning(self, failure: RuntimeError) -> Exception:
        """Return the error to raise for a failed batch; the pool donated to it may be lost."""
        try:
            jax.block_until_ready(self.pool)
        except RuntimeError as error:
            return DeviceLost(f"the KV cache was lost with a batch: {error}")
        if "RESOURCE_EXHAUSTED" in str(failure):
            return OutOfMemory(str(failure))
        return failure


def pool_shapes(plan: JaxPlan, count: int) -> Any:
    """Return the shapes of a pool of `count` pages."""
    config = plan.architecture.config
    dtype = jnp.dtype(plan.dtype_name)
    if plan.device.platform == "cpu" and dtype == jnp.bfloat16:
        dtype = jnp.dtype(jnp.uint16)  # see `Pool`
    shape = (config.num_layers, count, plan.pages.size, 2 * plan.heads.width)
    pages: Any = jax.ShapeDtypeStruct(shape, dtype)
    return Pool(pages)


def attends_of(name: str) -> Attend:
    if name == "pallas":
        from gpuscore.backends.jax.kernel import PallasAttend

        return PallasAttend()
    return XlaAttend()
