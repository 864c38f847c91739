"""The compiled programs of a backend: one per size, all compiled before the first request."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.jax.attention import Attend, Attention, LayerKeys, Pool, store
from gpuscore.backends.jax.decoder import Decoder, DecoderWeights
from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.label_head import LABEL_TILE, label_logits, vocab_statistics
from gpuscore.backends.jax.layout import (
    ProgramSizes,
    RowTiles,
    TileSizes,
    buffer_length,
    divided,
)
from gpuscore.backends.jax.products import part, put

# Labels beyond a batch's array are computed by further calls. One call takes at most this many
# labels per token of the bucket.
LABELS_PER_TOKEN = 4
# With excess precision, XLA would skip roundings between operations that it fuses.
XLA_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}

# (weights, pool, array of the batch) -> pool, scored rows
Extend: TypeAlias = Callable[..., tuple[Pool, "ScoredRows"]]
Labels: TypeAlias = Callable[..., Array]  # the arguments of `more_labels`


class ScoredRows(NamedTuple):
    hidden: Array  # [T, E]; only the first N rows are scored rows, here and below
    labels: Array  # float32 [ProgramSizes.labels] logits
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
class PaddedBatch:
    """`decoder.ForwardContext` over the tables of one batch."""

    attention: Attention
    attends: Attend

    @property
    def all_rows(self) -> RowTiles:
        return self.attention.tables.all_rows, self.attention.tables.numbers.rows[0]

    @property
    def scored(self) -> RowTiles:
        return self.attention.tables.scored, self.attention.tables.numbers.scored[0]

    @property
    def tiling(self) -> TileSizes:
        return self.attention.tiling

    @property
    def lanes(self) -> int:
        return self.attention.heads.lanes

    def buffers(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        heads = self.attention.heads
        rows = len(self.attention.tables.token_ids)
        q = jnp.zeros((1, heads.query, heads.dim), dtype)
        columns = jax.eval_shape(partial(self.attends.form, heads), q).shape[1]
        # Blocks of keys reach past the last row; those keys are masked, but must be finite.
        kv = jnp.zeros((rows + 2 * self.attention.margin, 2 * heads.width), dtype)
        return jnp.zeros((rows, columns), dtype), kv

    def put_queries(self, buffer: Array, q: Array, start: Array) -> Array:
        return put(buffer, self.attends.form(self.attention.heads, q), start)

    def put_keys(self, buffer: Array, k: Array, v: Array, start: Array) -> Array:
        kv = self.attention.heads.joined(k, v)
        width = self.attention.heads.width
        # A masked key has weight 0, but 0 times a value of NaN is NaN.
        fine = jnp.isfinite(kv[:, width:]).all(1, keepdims=True)
        kv = jnp.where(fine, kv, jnp.where(jnp.arange(2 * width) < width, jnp.nan, 0))
        return put(buffer, kv.astype(buffer.dtype), self.attention.margin + start)

    def store(self, pool: Pool, layer: Array, kv: Array) -> Pool:
        return store(self.attention, pool, layer, kv)

    def attend(self, chosen: RowTiles, keys: LayerKeys, q: Array) -> Array:
        with jax.named_scope("attend"):
            return self.attends(self.attention, chosen, keys, q)

    def outputs(self, buffer: Array, start: Array, rows: int) -> Array:
        return self.attends.plain(self.attention.heads, part(buffer, start, rows))


@dataclass(frozen=True, slots=True)
class ProgramModel:
    """The parts that programs of all sizes share; of weights and pool only the shapes are used."""

    config: DecoderConfig
    weights: DecoderWeights
    pool: Any
    attends: Attend
    heads: Heads


def run(
    weights: DecoderWeights, pool: Pool, buffer: Array, *, model: ProgramModel, sizes: ProgramSizes
) -> tuple[Pool, ScoredRows]:
    """Run one batch; `buffer` is the result of `padding.padded`."""
    cfg = model.config
    tables = divided(buffer, sizes)
    attention = Attention(
        cfg.attention_scale, model.heads, sizes.tiling, any(cfg.windows), tables=tables
    )
    numbers = tables.numbers
    batch = PaddedBatch(attention, model.attends)
    decoder = Decoder(model.config, weights)
    hidden, pool = decoder(tables.token_ids, tables.positions, batch, pool)
    rows = sizes.tiling.product_rows[-1]
    tiles = lax.div(numbers.scored[0] + rows - 1, rows)
    statistics = vocab_statistics(hidden, weights.lm_head, tiles, numbers.statistics[0], rows=rows)
    labels = (tables.label_rows, tables.label_ids, numbers.labels[0])
    return pool, ScoredRows(hidden, label_logits(hidden, weights.lm_head, *labels), *statistics)


def more_labels(hidden: Array, lm_head: Array, buffer: Array) -> Array:
    """Return the logits of labels that do not fit in a batch's array.

    Args:
        hidden, lm_head: the arguments of `label_logits`.
        buffer: int32 [1 + 2 * L]: their number, their rows, their ids.
    """
    rows, ids = jnp.split(buffer[1:], 2)
    return label_logits(hidden, lm_head, rows, ids, count=buffer[0])


class TracedPrograms(NamedTuple):
    """`Programs` that are not compiled yet, as `jax.stages.Traced`."""

    extend: Any
    labels: Any
    max_labels: int


def compile_programs(sizes: ProgramSizes, model: ProgramModel, device: jax.Device) -> Programs:
    """Compile the programs of one size."""
    traced = trace_programs(sizes, model, device)
    extend, labels = (
        program.lower().compile(XLA_OPTIONS) for program in (traced.extend, traced.labels)
    )
    together = _bytes(extend) + _bytes(labels)
    return Programs(sizes, extend, labels, traced.max_labels, bytes=together)


def trace_programs(sizes: ProgramSizes, model: ProgramModel, device: jax.Device) -> TracedPrograms:
    """Trace the programs of one size. `make check-tpu` lowers them for TPUs without having one."""
    sharding = SingleDeviceSharding(device)
    weights = model.weights

    def shaped(value: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def numbers(length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((length,), jnp.int32, sharding=sharding)

    one_batch = partial(run, model=model, sizes=sizes)
    arguments = *jax.tree.map(shaped, (weights, model.pool)), numbers(buffer_length(sizes))
    max_labels = max(LABEL_TILE, LABELS_PER_TOKEN * sizes.tokens)
    hidden = jax.ShapeDtypeStruct(
        (sizes.tokens, model.config.head_width), weights.embed_tokens.dtype, sharding=sharding
    )
    head = shaped(weights.lm_head)
    return TracedPrograms(
        jax.jit(one_batch, donate_argnums=1).trace(*arguments),
        jax.jit(more_labels).trace(hidden, head, numbers(1 + 2 * max_labels)),
        max_labels,
    )


def _bytes(compiled: Any) -> int:
    """Bytes of temporary memory and results; 0 if XLA does not report it."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
