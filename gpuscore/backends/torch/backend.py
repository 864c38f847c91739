"""`TorchBackend`: batches on a CPU or CUDA device, in order, on a thread of its own."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.base import OutOfMemory
from gpuscore.backends.common.batches import largest_batches, largest_in_parts, warmup_batches
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.memory import Memory
from gpuscore.backends.common.plan import measure, mebibytes
from gpuscore.backends.common.start_check import (
    ABSOLUTE,
    IN_EIGHT_BITS,
    MOST_ROWS,
    TREES,
    WITHOUT_QUERY,
    KnownRequests,
    Reference,
    Run,
    check_start,
    pages_for,
)
from gpuscore.backends.torch.attention.choice import attention_factory
from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.decoder import Decoder
from gpuscore.backends.torch.delta_net.layer import DeltaNetBackend
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.backends.torch.devices import bytes_outside_allocator, memory_of, sum_in_float32
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.backends.torch.group import RankGroup
from gpuscore.backends.torch.kernels import in_triton
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.launcher import (
    Finish,
    Head,
    Launcher,
    PlainLauncher,
    ShardedVocabulary,
    WholeHead,
)
from gpuscore.backends.torch.layers import STEADY_ROWS, all_at_once, in_tiles
from gpuscore.backends.torch.loader import WeightFormat, load_weights
from gpuscore.backends.torch.operators import Operators
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.backends.torch.queues import queue_of
from gpuscore.backends.torch.rows_in_c import in_c
from gpuscore.backends.torch.start_check import reference
from gpuscore.backends.torch.weights import DecoderWeights, shortened
from gpuscore.backends.torch.work_thread import Done, WorkThread, translate_errors
from gpuscore.errors import ConfigError
from gpuscore.system.heap import keep_freed_blocks
from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores
from gpuscore_kernels import Implementation
from gpuscore_kernels.extend_attention.reference import extend_attention
from gpuscore_kernels.hopper import FEWEST_ROWS, gated_product
from gpuscore_kernels.label_head import TILE_ROWS, few_products
from gpuscore_kernels.row_functions.build import BuildError

logger = logging.getLogger(__name__)

# In the start check, a product of so many rows or more computes silu(gate) * up inside it. Some
# batches of the known requests have more rows, some fewer, so both kernels are checked.
GATED_FROM = 200

ResultT = TypeVar("ResultT")
Launched: TypeAlias = Future[Finish] | Done[Finish]


class TorchBackend:
    """Implements `Backend`.

    Args:
        plan: what to load.
        memory: measures the memory; None = measure the plan's device.
        group: the ranks that share the model, this process among them. They make the same calls in
            the same order.

    Raises:
        ConfigError: the checkpoint is damaged or leaves too little memory, or an attention backend
            or kernel does not agree with its reference.
    """

    def __init__(
        self,
        plan: TorchPlan,
        memory: Memory | None = None,
        group: RankGroup | None = None,
    ) -> None:
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        sum_in_float32()
        self.plan = plan
        self.device = plan.device
        self._impl: Implementation = "triton" if plan.kernels else "reference"
        self._group = group
        config = plan.shard_config
        self._thread = WorkThread(
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-backend")
        )
        self._uncollected: set[Launched] = set()
        weights, self._in_c = self._load()
        whole = plan.architecture.config
        products = None if plan.kernels else self._compiler(few_products)
        self._head: Head = WholeHead(self._impl, whole.final_softcap, products)
        self._embedding: Callable[[Tensor, Tensor], Tensor] = functional.embedding
        if group is not None:
            vocabulary = ShardedVocabulary(group, whole.vocab_size, self._head)
            self._embedding = vocabulary.embedding
            self._head = vocabulary if whole.classes is None else self._head
        if plan.device.type == "cpu":
            keep_freed_blocks()
        self._by_rows = in_tiles(STEADY_ROWS) if plan.deterministic else all_at_once
        self._attention = attention_factory(
            plan.attention, self._compiler(extend_attention), plan.deterministic
        )
        try:
            # This launcher, with few layers and pages, is only for the check and the measurement.
            short, some = shortened(config, weights)
            pages = pages_for(plan.pages.size)
            self.launcher = self._make_launcher(
                short, some, num_pages=pages, num_states=1, gated_from=GATED_FROM
            )
            if group is not None:
                group.connect()
            self._check(short, some)
            of_device = memory or memory_of(plan.device, plan.shard.ranks)
            num_pages = self._count_pages(of_device, short.num_layers)
            self.launcher.release()
            del self.launcher  # its pages and graphs make room
            states = plan.pages.num_states
            self.launcher = self._make_launcher(config, weights, num_pages, states, FEWEST_ROWS)
        except BuildError as error:
            self.close()
            raise ConfigError(f"--attention {plan.attention}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._limits = plan.limits(num_pages)
        if plan.attention == "fa4":
            logger.info("silu(gate) * up in gate-up products: %s", self._limits.gated_product)

    def _load(self) -> tuple[DecoderWeights, Compiler]:
        """Read the weights; functions in C are compiled meanwhile."""
        plan = self.plan
        compiled = self._thread.submit(partial(in_c, plan.dtype)) if plan.compile else None
        try:
            weights = load_weights(
                Path(plan.directory),
                plan.architecture,
                WeightFormat(plan.dtype, plan.device, plan.precision),
                self._group,
            )
            compiler = eagerly if compiled is None else compiled.result()
        except BaseException:
            self.close()
            raise
        return weights, compiler

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    @property
    def layers_done(self) -> int:
        return self.launcher.decoder.layers_done

    def warmup(self) -> None:
        """Capture graphs, then run small batches of every layout so that lazy set-up is done."""
        self._run(self.launcher.capture).result()
        if self.device.type == "cuda":  # elsewhere the measurement has done it
            self._set_up()

    def extend(self, batch: PackedBatch) -> Launched:
        task = partial(translate_errors, lambda: self.launcher.launch(batch), self.device)
        # While another batch is in flight, the device is busy and the caller can plan the next one.
        at_once = not self._uncollected and self.launcher.is_quick(batch)
        pending: Launched = self._thread.do(task) if at_once else self._thread.submit(task)
        self._uncollected.add(pending)
        return pending

    def collect(self, pending: Launched) -> RowScores:
        self._uncollected.discard(pending)
        return translate_errors(pending.result(), self.device)

    def close(self) -> None:
        self._thread.close()

    def _run(self, run: Callable[[], ResultT]) -> Future[ResultT]:
        return self._thread.submit(partial(translate_errors, run, self.device))

    def _make_launcher(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        num_pages: int,
        num_states: int,
        gated_from: int,
    ) -> Launcher:
        plan = self.plan
        operators = Operators(
            self._compiler,
            self._by_rows,
            impl=self._impl,
            embedding=self._embedding,
            gated_product=None if plan.not_gated else gated_product,
            gated_from=gated_from,
        )
        decoder = Decoder(config, weights, operators)
        pool = KVPool(config, num_pages, plan.pages.size, plan.dtype, device=plan.device)
        attention = self._attention(config, pool)
        states = StatePool(config, num_states, plan.dtype, plan.device)
        linear = None
        if config.delta_net is not None:
            linear = DeltaNetBackend(config, states, self._compiler, self._impl)
        if plan.graph_tokens is None:
            return PlainLauncher(
                decoder, pool, attention, linear, head=self._head, by_rows=self._by_rows
            )
        queue = queue_of(plan.device)
        launcher = GraphLauncher(
            decoder, attention, linear, queue=queue, graph_tokens=plan.graph_tokens
        )
        launcher.reserve(self._largest())
        return launcher

    @property
    def _compiler(self) -> Compiler:
        return in_triton if self.plan.kernels else self._in_c

    def _check(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        """Compare the launcher with the reference (`start_check`)."""
        plan = self.plan
        whole = self.plan.architecture.config
        group = self._group
        trees = (*TREES, WITHOUT_QUERY) if plan.attention == "flashinfer" else TREES
        labels = len(weights.lm_head) if group is None else whole.label_rows
        known = KnownRequests(whole.vocab_size, labels, plan.pages.size, trees)

        def run_on(launcher: Launcher) -> Run:
            return lambda batch: self._run(lambda: launcher.launch(batch)()).result()

        head: Head = WholeHead("reference", whole.final_softcap)
        if group is not None and whole.classes is None:
            head = ShardedVocabulary(group, whole.vocab_size, head)

        def plainly(dtype: torch.dtype) -> Run:
            return run_on(reference(config, weights, head, self._embedding, dtype=dtype))

        exact = plainly(torch.float32)
        rounded = None if plan.dtype == torch.float32 else plainly(plan.dtype)
        eight_bits = plan.precision == "int8"
        compiled = "--compile on, " if plan.compile else ""
        check_start(
            f"{compiled}--attention {plan.attention} with --kernels "
            f"{'triton' if plan.kernels else 'torch'}",
            known,
            run_on(self.launcher),
            Reference(
                exact,
                rounded,
                IN_EIGHT_BITS if eight_bits else ABSOLUTE,
                MOST_ROWS if eight_bits or whole.mixture is not None else 1.0,
            ),
        )

    def _largest(self) -> Iterable[PackedBatch]:
        plan = self.plan
        return largest_batches(plan.max_tokens, plan.max_model_len, plan.pages.size)

    def _count_pages(self, memory: Memory, layers: int) -> int:
        plan = self.plan
        pages = self.plan.pages
        self._set_up()  # before measuring, because what it allocates stays

        def run(batches: Iterable[PackedBatch]) -> None:
            # The graph comes first, because torch empties its cache before a capture: the memory
            # that batches took before would not count together with the graph's.
            self._run(self.launcher.capture_largest).result()
            self.run_all(batches)

        parts: Sequence[Iterable[PackedBatch]] = [self._largest()]
        if self.device.type == "cpu":
            parts = largest_in_parts(plan.max_tokens, plan.max_model_len, pages.size)
        try:
            measured = measure(memory, *(partial(run, part) for part in parts))
        except OutOfMemory as error:
            raise ConfigError(
                f"a batch of --max-batch-tokens {plan.max_tokens} does not fit into the memory "
                f"beside {mebibytes(plan.weight_bytes)} of weights; lower --max-batch-tokens"
            ) from error
        num_pages = pages.count(measured.free, measured.batch + self._graph_bytes(layers))
        if self._group is not None:
            num_pages = self._group.least(num_pages)
        if pages.num_states:
            of_states = mebibytes(pages.state_bytes)
            logger.info("memory: %d states of linear layers %s", pages.num_states, of_states)
        how = "estimated" if measured.estimated else "measured"
        logger.info(
            "memory: weights %s, largest batch %s, KV cache %s",
            mebibytes(plan.weight_bytes),
            f"{mebibytes(measured.batch)} ({how})",
            pages.describe(num_pages),
        )
        return num_pages

    def _graph_bytes(self, layers: int) -> int:
        """Return the bytes that CUDA takes for the executables of all graphs, at most.

        The graphs of the shortened model, with `layers` layers, are captured to measure them,
        except the largest graph, which exists already. A graph's executable grows with its number
        of kernels: some for each layer, and some that do not depend on the number of layers.
        """
        if not self.plan.graph_tokens or self.device.type != "cuda":
            return 0
        captured: list[int] = []
        taken = bytes_outside_allocator(
            self.device,
            lambda: captured.append(self._run(self.launcher.capture).result()),
        )
        each = -(-taken // max(1, captured[0]))
        count = -(-each * (captured[0] + 1) * self.plan.shard_config.num_layers // layers)
        logger.info("memory: executables of graphs %s", mebibytes(count))
        return count

    def _set_up(self) -> None:
        rows = (1, TILE_ROWS + 1) if self.plan.kernels else (1,)  # fewer and more than a tile
        longest = min(self.plan.max_tokens, self.plan.max_model_len)  # tokens of a segment
        self.run_all(warmup_batches(longest, self.plan.pages.size, rows))

    def run_all(self, batches: Iterable[PackedBatch]) -> None:
        """Compute batches in order, only to measure their memory or to finish set-up."""
        for batch in batches:
            self.collect(self.extend(batch))
