"""The decoder of Llama-like models over trees of weights; `backends/torch/decoder.py` has the same
parts, with the same names, in the same order.

What differs: arrays are computed in tiles of rows, one after the other, into buffers that all
layers share; and all layers are one loop, so their weights are stacked.

T rows, M rows of a tile, N scored rows, E hidden size, I size of the MLP, H heads, D head size.
docs/explanation/rounding.md lists the rounding points.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.jax.attention import LayerKeys, Pool
from gpuscore.backends.jax.layout import RowTiles, TileSizes, product_tiles
from gpuscore.backends.jax.products import (
    Quantized,
    element,
    linear,
    part,
    put,
    rows_at,
    rows_of,
)
from gpuscore.backends.jax.rotary import (
    Rotary,
    by_head,
    norm_and_rotate_heads,
    rms_norm,
    rotary_tables,
    sliced,
)

EVERYTHING = 1 << 30  # the window of a layer without one


class LayerWeights(NamedTuple):
    """Weights of one layer, or of all layers with a first dimension over layers."""

    input_layernorm: Array  # [E]
    qkv_proj: Array | Quantized  # [(H + 2 Hkv) D, E]: q rows, then k, then v
    qkv_bias: Array | None
    q_norm: Array | None  # [D]
    k_norm: Array | None
    o_proj: Array | Quantized  # [E, H D]
    o_bias: Array | None
    post_attention_layernorm: Array  # [E]
    gate_up_proj: Array | Quantized  # [2 I, E]
    gate_up_bias: Array | None
    down_proj: Array | Quantized  # [E, I]
    down_bias: Array | None


class DecoderWeights(NamedTuple):
    embed_tokens: Array  # [V, E]
    layers: LayerWeights  # of all layers
    norm: Array  # [E]
    # [V, E], the embedding itself if tied; or [classes, E]; or with a bias [classes, E + 8], where
    # column E is the bias, for which hidden states get columns of ones.
    lm_head: Array
    head_inner: Array | None = None  # [E, E] the first layer, if the head has two
    head_inner_bias: Array | None = None


class ForwardContext(Protocol):
    """What the layers read of a batch, and its attention, over buffers that all layers share."""

    @property
    def all_rows(self) -> RowTiles: ...

    @property
    def scored(self) -> RowTiles: ...

    @property
    def tiling(self) -> TileSizes: ...

    @property
    def lanes(self) -> int:
        """Columns of the tiles in which the device stores arrays; 1 if it has none."""

    def buffers(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Return memory for queries and outputs of all rows, and for their keys and values."""

    def put_queries(self, buffer: Array, q: Array, start: Array) -> Array:
        """Return the buffer with q [M, H, D] of rows from `start` on."""

    def put_keys(self, buffer: Array, k: Array, v: Array, start: Array) -> Array:
        """Return the buffer with k and v [M, Hkv, D] of rows from `start` on."""

    def store(self, pool: Pool, layer: Array, kv: Array) -> Pool:
        """Return the pool with keys and values of the rows that are kept."""

    def attend(self, chosen: RowTiles, keys: LayerKeys, q: Array) -> Array:
        """Return buffer `q`, in which outputs have taken the place of the chosen rows' queries."""

    def outputs(self, buffer: Array, start: Array, rows: int) -> Array:
        """Return the outputs [M, H * D] of `rows` rows from `start` on."""


class State(NamedTuple):
    """What each layer passes to the next; updated in place."""

    hidden_states: Array  # float32 [T, E], the residual stream
    q: Array  # see `ForwardContext.buffers`
    kv: Array
    pool: Pool


@dataclass(frozen=True, slots=True)
class Attention:
    """The parts of attention that are products of a tile's rows.

    `ForwardContext.attend` is what lies between the queries and `o_proj`.
    """

    config: DecoderConfig
    weights: LayerWeights
    lanes: int

    def __call__(
        self, position_embeddings: Rotary, hidden_states: Array
    ) -> tuple[Array, Array, Array]:
        """Return q [M, H, D], k and v [M, Hkv, D]; q and k are normed and rotated."""
        with jax.named_scope("queries_keys_values"):
            size = self._q_size
            of_keys = self.config.num_kv_heads * self.config.head_dim
            qkv = linear(hidden_states, self.weights.qkv_proj, self.weights.qkv_bias)
            q, k, v = jnp.split(qkv, (size, size + of_keys), axis=1)
            q = self._norm_and_rotate(q, self.weights.q_norm, position_embeddings)
            k = self._norm_and_rotate(k, self.weights.k_norm, position_embeddings)
            return q, k, by_head(v, self.config)

    def keys_values(self, position_embeddings: Rotary, hidden_states: Array) -> tuple[Array, Array]:
        """Return k and v [M, Hkv, D]; k is normed and rotated."""
        with jax.named_scope("keys_values"):
            weights = self.weights
            size = self._q_size
            bias = None if weights.qkv_bias is None else weights.qkv_bias[size:]
            kv = linear(hidden_states, rows_of(weights.qkv_proj, size), bias)
            k, v = jnp.split(kv, 2, axis=1)
            k = self._norm_and_rotate(k, weights.k_norm, position_embeddings)
            return k, by_head(v, self.config)

    def queries(self, position_embeddings: Rotary, hidden_states: Array) -> Array:
        """Return q [M, H, D], normed and rotated."""
        with jax.named_scope("queries"):
            weights = self.weights
            size = self._q_size
            bias = None if weights.qkv_bias is None else weights.qkv_bias[:size]
            q = linear(hidden_states, rows_of(weights.qkv_proj, 0, size), bias)
            return self._norm_and_rotate(q, weights.q_norm, position_embeddings)

    def o_proj(self, attn_output: Array) -> Array:
        return linear(attn_output, self.weights.o_proj, self.weights.o_bias)

    @property
    def _q_size(self) -> int:
        return self.config.num_heads * self.config.head_dim

    def _norm_and_rotate(self, x: Array, norm: Array | None, position_embeddings: Rotary) -> Array:
        return norm_and_rotate_heads(x, norm, position_embeddings, self.config, lanes=self.lanes)


class MLP(NamedTuple):
    weights: LayerWeights

    def __call__(self, hidden_states: Array) -> Array:
        weights = self.weights
        gate_up = linear(hidden_states, weights.gate_up_proj, weights.gate_up_bias)
        gate, up = jnp.split(gate_up, 2, axis=1)
        wide = gate.astype(jnp.float32)
        up = up.astype(jnp.float32)
        inner = (jax.nn.silu(wide) * up).astype(hidden_states.dtype)
        return linear(inner, weights.down_proj, weights.down_bias)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    layer_idx: Array
    config: DecoderConfig
    weights: LayerWeights
    window: Array
    context: ForwardContext

    @property
    def self_attn(self) -> Attention:
        return Attention(self.config, self.weights, self.context.lanes)

    def __call__(self, position_embeddings: Rotary, state: State) -> State:
        context = self.context

        def project(start: Array, size: int, buffers: tuple[Array, Array]) -> tuple[Array, Array]:
            q_buffer, kv_buffer = buffers
            hidden_states = self.input_layernorm(part(state.hidden_states, start, size))
            q, k, v = self.self_attn(sliced(position_embeddings, start, size), hidden_states)
            q_buffer = context.put_queries(q_buffer, q, start)
            return q_buffer, context.put_keys(kv_buffer, k, v, start)

        q, kv = by_tiles(context.tiling, context.all_rows[1], project, (state.q, state.kv))
        pool = context.store(state.pool, self.layer_idx, kv)
        q = context.attend(context.all_rows, LayerKeys(pool, self.layer_idx, self.window, kv), q)
        hidden_states = self._after_attention(state.hidden_states, q, context.all_rows)
        return State(hidden_states, q, kv, pool)

    def of_scored_rows(
        self, position_embeddings: Rotary, state: State, norm: Callable[[Array], Array]
    ) -> tuple[Array, Pool]:
        """Return hidden states after `norm` [T, E], the scored rows first, and the pool.

        For the last layer. It computes keys and values of all rows, because later batches may read
        them, and everything else for the scored rows only.
        """
        context = self.context

        def project_all(start: Array, size: int, kv_buffer: Array) -> Array:
            hidden_states = self.input_layernorm(part(state.hidden_states, start, size))
            rotary = sliced(position_embeddings, start, size)
            k, v = self.self_attn.keys_values(rotary, hidden_states)
            return context.put_keys(kv_buffer, k, v, start)

        kv = by_tiles(context.tiling, context.all_rows[1], project_all, state.kv)
        pool = context.store(state.pool, self.layer_idx, kv)
        tiles, num_scored = context.scored
        scored_embeddings = rotary_tables(tiles.rows.position, self.config)

        def project_scored(
            start: Array, size: int, buffers: tuple[Array, Array]
        ) -> tuple[Array, Array]:
            residual, q_buffer = buffers
            rows = rows_at(state.hidden_states, part(tiles.rows.place, start, size))
            hidden_states = self.input_layernorm(rows)
            q = self.self_attn.queries(sliced(scored_embeddings, start, size), hidden_states)
            return put(residual, rows, start), context.put_queries(q_buffer, q, start)

        buffers = jnp.zeros_like(state.hidden_states), state.q
        residual, q = by_tiles(context.tiling, num_scored, project_scored, buffers)
        q = context.attend(context.scored, LayerKeys(pool, self.layer_idx, self.window, kv), q)
        return self._after_attention(residual, q, context.scored, norm), pool

    def _after_attention(
        self,
        residual: Array,
        q: Array,
        rows: RowTiles,
        norm: Callable[[Array], Array] | None = None,
    ) -> Array:
        """Add attention's outputs, which are in `q`, and the MLP's to the residual stream; then
        apply `norm`, if given."""

        def of_tile(start: Array, size: int, x: Array) -> Array:
            attn_output = self.context.outputs(q, start, size)
            hidden_states = part(x, start, size)
            with jax.named_scope("output"):
                attn_output = self.self_attn.o_proj(attn_output)
                hidden_states = hidden_states + attn_output.astype(jnp.float32)
            with jax.named_scope("mlp"):
                normed = rms_norm(hidden_states, self.weights.post_attention_layernorm, self.config)
                hidden_states = hidden_states + MLP(self.weights)(normed).astype(jnp.float32)
            if norm is not None:
                hidden_states = norm(hidden_states)
            return put(x, hidden_states.astype(x.dtype), start)

        return by_tiles(self.context.tiling, rows[1], of_tile, residual)

    def input_layernorm(self, hidden_states: Array) -> Array:
        with jax.named_scope("norm"):
            return rms_norm(hidden_states, self.weights.input_layernorm, self.config)


class Decoder(NamedTuple):
    """A model without its head: from token ids to the hidden states of the scored rows."""

    config: DecoderConfig
    weights: DecoderWeights

    def __call__(
        self, token_ids: Array, positions: Array, context: ForwardContext, pool: Pool
    ) -> tuple[Array, Pool]:
        """Return the label head's input [T, E], the scored rows first, and the pool.

        The residual stream is float32.
        """
        config = self.config
        embed_tokens = self.weights.embed_tokens
        layers = self.weights.layers
        with jax.named_scope("embed"):
            hidden_states = rows_at(embed_tokens, token_ids).astype(jnp.float32)
        position_embeddings = rotary_tables(positions, config)
        windows = jnp.array([window or EVERYTHING for window in config.windows], jnp.int32)
        last = config.num_layers - 1

        def one_layer(index: Array, state: State) -> State:
            weights = jax.tree.map(lambda w: part(w, index, 1)[0], layers)
            layer = DecoderLayer(index, config, weights, element(windows, index), context)
            return layer(position_embeddings, state)

        state = State(hidden_states, *context.buffers(embed_tokens.dtype), pool)
        state = lax.fori_loop(0, last, one_layer, state)
        with jax.named_scope("last_layer"):
            weights = jax.tree.map(lambda w: w[last], layers)
            layer = DecoderLayer(jnp.int32(last), config, weights, windows[last], context)
            hidden_states, pool = layer.of_scored_rows(position_embeddings, state, self.norm)
            width = self.weights.lm_head.shape[1] - config.hidden_size
            if width:
                hidden_states = jnp.pad(hidden_states, ((0, 0), (0, width)), constant_values=1)
            return hidden_states.astype(embed_tokens.dtype), pool

    def norm(self, hidden_states: Array) -> Array:
        """Apply the final norm, then the head's first layer, if the head has two."""
        weights = self.weights
        with jax.named_scope("final_norm"):
            normed = rms_norm(hidden_states, weights.norm, self.config)
            if weights.head_inner is None:
                return normed
            return jax.nn.relu(linear(normed, weights.head_inner, weights.head_inner_bias))


def by_tiles(
    tiling: TileSizes, rows: Array, run: Callable[[Array, int, Any], Any], state: Any
) -> Any:
    """Call `run` for each tile with its first row, its size and the state of the call before."""
    for size, (first, count) in zip(tiling.product_rows, product_tiles(rows, tiling), strict=True):

        def one(index: Array, state: Any, first: Any = first, size: int = size) -> Any:
            return run(first + index * size, size, state)

        state = lax.fori_loop(0, count, one, state)
    return state
