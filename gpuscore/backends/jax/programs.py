"""The compiled programs of a backend: one per size, all compiled before the first request."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from gpuscore.backends.common.batches import warmup_batches
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.jax.attention import Attention, Pool, PrefixPass, attend, store
from gpuscore.backends.jax.decoder import Weights, forward
from gpuscore.backends.jax.label_head import LABEL_TILE, ONE, label_logits, vocab_statistics
from gpuscore.backends.jax.layout import ProgramSizes, Tables, Tile, Tiles, padded

LABELS_PER_TOKEN = 16  # labels of one call, per token; a batch with more labels takes several calls
# With excess precision, XLA would skip roundings between operations that it fuses.
_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
# XLA's newer generator of CPU code takes more than twice as long to compile these programs, which
# then run no faster.
_CPU_OPTIONS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}

# (weights, pool, tables, the statistics that are wanted) -> pool, scored rows
Extend: TypeAlias = Callable[..., tuple[Pool, "ScoredRows"]]
Labels: TypeAlias = Callable[..., Array]  # the arguments of `label_logits`


class ScoredRows(NamedTuple):
    hidden: Array  # [T, E]; only the first N rows are scored rows, here and below
    lse: Array  # float32 [T]
    top: Array  # int32 [T, MAX_TOP]
    top_logits: Array  # float32 [T, MAX_TOP]


@dataclass(frozen=True, slots=True)
class Programs:
    """The two programs that run a batch of these sizes."""

    sizes: ProgramSizes
    extend: Extend
    labels: Labels
    max_labels: int  # of one call of `labels`
    bytes: int  # memory that running them takes beside weights and pool


@dataclass(frozen=True, slots=True)
class BatchAttention:
    """`decoder.Attend` over the tables of one batch."""

    attention: Attention
    tables: Tables

    @property
    def every(self) -> Tiles:
        return self.tables.every

    @property
    def scored(self) -> Tiles:
        return self.tables.scored

    def store(self, pool: Pool, layer: Array, k: Array, v: Array) -> Pool:
        return store(self.tables, pool, layer, k, v)

    def __call__(
        self, tile: Tile, pool: Pool, layer: Array, window: Array, q: Array, k: Array, v: Array
    ) -> Array:
        return attend(self.attention, self.tables, tile, pool, layer, window, q, k, v)


def run(
    weights: Weights,
    pool: Pool,
    tables: Tables,
    wanted: Array,
    *,
    cfg: DecoderConfig,
    attention: Attention,
) -> tuple[Pool, ScoredRows]:
    """Run one batch, without its label logits."""
    attends = BatchAttention(attention, tables)
    hidden, pool = forward(tables.token_ids, tables.positions, weights, cfg, attends, pool)
    count, rows = tables.scored.number, attention.tiling.rows
    return pool, ScoredRows(hidden, *vocab_statistics(hidden, weights.lm_head, count, wanted, rows))


class TracedPrograms(NamedTuple):
    """`Programs` that are not compiled yet, as `jax.stages.Traced`."""

    extend: Any
    labels: Any
    max_labels: int


def compile_programs(
    sizes: ProgramSizes,
    cfg: DecoderConfig,
    weights: Weights,
    pool: Any,
    prefix_pass: PrefixPass,
    device: jax.Device,
) -> Programs:
    """Compile the programs of one size; only the shapes of weights and pool are used."""
    traced, options = (
        trace_programs(sizes, cfg, weights, pool, prefix_pass, device),
        options_of(device),
    )
    extend, labels = (one.lower().compile(options) for one in (traced.extend, traced.labels))
    return Programs(sizes, extend, labels, traced.max_labels, _bytes(extend) + _bytes(labels))


def options_of(device: jax.Device) -> dict[str, Any]:
    """Return the options of XLA that programs for a device are compiled with."""
    return _OPTIONS | (_CPU_OPTIONS if device.platform == "cpu" else {})


def trace_programs(
    sizes: ProgramSizes,
    cfg: DecoderConfig,
    weights: Weights,
    pool: Any,
    prefix_pass: PrefixPass,
    device: jax.Device,
) -> TracedPrograms:
    """Trace the programs of one size. `tests/tpu_code` lowers them for TPUs that are not there."""
    attention = Attention(
        scale=cfg.attention_scale,
        group=cfg.num_heads // cfg.num_kv_heads,
        tiling=sizes.tiling,
        windowed=any(cfg.windows),
        prefix_pass=prefix_pass,
    )
    there = SingleDeviceSharding(device)

    def shaped(value: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=there)

    one = next(iter(warmup_batches(1, 1)))
    arguments = jax.tree.map(
        shaped, (weights, pool, padded(one, sizes, 1, 1), np.array(ONE, np.int32))
    )
    extend = jax.jit(partial(run, cfg=cfg, attention=attention), donate_argnums=1)
    max_labels = max(LABEL_TILE, LABELS_PER_TOKEN * sizes.tokens)
    hidden = jax.ShapeDtypeStruct(
        (sizes.tokens, cfg.hidden_size), weights.embed.dtype, sharding=there
    )
    numbers = jax.ShapeDtypeStruct((max_labels,), jnp.int32, sharding=there)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=there)
    labels = jax.jit(label_logits)
    return TracedPrograms(
        extend.trace(*arguments),
        labels.trace(hidden, shaped(weights.lm_head), numbers, numbers, count),
        max_labels,
    )


def _bytes(compiled: Any) -> int:
    """Bytes of temporary memory and results; 0 if XLA does not tell."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    return int(found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes)
