"""Reference scores for the check at start (`common/start_check`): the decoder in plain jnp."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.jax.attention import LayerKeys, Pool
from gpuscore.backends.jax.decoder import Decoder, DecoderWeights
from gpuscore.backends.jax.label_head import VOCAB_TILE
from gpuscore.backends.jax.layout import Bounds, Rows, RowTiles, Tiles, TileSizes
from gpuscore.backends.jax.products import contract, part, put
from gpuscore.types.batch import PackedBatch, RowScores, visible_rows

NORMS = ("input_layernorm", "q_norm", "k_norm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class MaskedBatch:
    """A `decoder.ForwardContext` without cached tokens, in which every row is scored."""

    config: DecoderConfig
    visible: Array  # bool [T, T]
    positions: Array  # [T]

    lanes = 1

    @property
    def tiling(self) -> TileSizes:
        rows = len(self.positions)
        return TileSizes(rows=rows, batch_keys=rows, prefix_pages=1, product_rows=(rows,))

    @property
    def all_rows(self) -> RowTiles:
        rows = Rows(jnp.arange(len(self.positions)), self.positions, self.positions)
        unused = jnp.zeros(1, jnp.int32)
        return Tiles(rows, Bounds(*(unused,) * 5), unused), jnp.int32(len(self.positions))

    scored = all_rows

    def buffers(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        rows = len(self.positions)
        dim = self.config.head_dim
        q = self.config.num_heads * dim
        kv = 2 * self.config.num_kv_heads * dim
        return jnp.zeros((rows, q), dtype), jnp.zeros((rows, kv), dtype)

    def put_queries(self, buffer: Array, q: Array, start: Array) -> Array:
        return put(buffer, q.reshape(len(q), -1), start)

    def put_keys(self, buffer: Array, k: Array, v: Array, start: Array) -> Array:
        return put(buffer, jnp.concatenate((k, v), axis=1).reshape(len(k), -1), start)

    def store(self, pool: Pool, layer: Array, kv: Array) -> Pool:
        return pool

    def attend(self, chosen: RowTiles, keys: LayerKeys, q: Array) -> Array:
        config = self.config
        rows = len(q)
        visible = self.visible & (self.positions > (self.positions - keys.window)[:, None])
        k, values = jnp.split(keys.kv.reshape(rows, -1, config.head_dim), 2, axis=1)
        grouped = q.reshape(rows, config.num_kv_heads, -1, config.head_dim)
        # By default float32 products are TF32 on CUDA, and bfloat16 on a TPU.
        in_float32 = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        scores = jnp.einsum("tkgd,skd->kgts", grouped, k, **in_float32)
        masked = jnp.where(visible, scores * config.attention_scale, -jnp.inf)
        weights = jax.nn.softmax(masked, axis=-1).astype(q.dtype)
        outputs = jnp.einsum("kgts,skd->tkgd", weights, values, **in_float32)
        return outputs.reshape(rows, -1).astype(q.dtype)

    def outputs(self, buffer: Array, start: Array, rows: int) -> Array:
        return part(buffer, start, rows)


def reference_scores(
    batch: PackedBatch, weights: DecoderWeights, config: DecoderConfig, dtype: jnp.dtype
) -> RowScores:
    """Return a batch's scores, computed in `dtype`, which is the weights' dtype or float32."""
    norms = {name: getattr(weights.layers, name) for name in NORMS}
    converted = {name: norm.astype(dtype) for name, norm in norms.items() if norm is not None}
    rows = weights._replace(
        embed_tokens=weights.embed_tokens[batch.token_ids].astype(dtype),
        layers=weights.layers._replace(**converted),
        norm=weights.norm.astype(dtype),
    )
    hidden = jax.jit(partial(reference_hidden, config))(
        rows, jnp.asarray(batch.positions), jnp.asarray(visible_rows(batch))
    ).astype(jnp.float32)
    starts = range(0, len(weights.lm_head), VOCAB_TILE)
    tiles = (weights.lm_head[i : i + VOCAB_TILE].astype(jnp.float32) for i in starts)
    logits = np.concatenate([contract(hidden, tile, ((1,), (1,))) for tile in tiles], axis=1)
    best = np.sort(logits, axis=1)[:, ::-1][:, : batch.num_top]
    lse = best[:, 0] + np.log(np.exp(logits - best[:, :1]).sum(axis=1))
    labels = logits[np.arange(len(logits)), batch.label_token_ids]
    return RowScores(labels, lse, np.zeros(best.shape, np.int32), best)


def reference_hidden(
    config: DecoderConfig, weights: DecoderWeights, positions: Array, visible: Array
) -> Array:
    """Return the hidden states of all tokens. A token attends to the tokens `visible` to it."""
    batch = MaskedBatch(config, visible, positions)
    rows = jnp.arange(len(positions))
    return Decoder(config, weights)(rows, positions, batch, Pool(jnp.zeros(0)))[0]
