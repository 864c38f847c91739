"""Label logits and full-vocabulary statistics in float32, a tile of the logits at a time."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.jax.indexing import chosen, part, put
from gpuscore.backends.jax.products import contract

VOCAB_TILE = 4096
LABEL_TILE = 64


def vocab_statistics(
    hidden: Array, lm_head: Array, tiles: Array, wanted: Array, rows: int
) -> tuple[Array, Array, Array]:
    """Return each row's log-sum-exp, float32 [N], most probable token, int32 [N], and its logit.

    Args:
        hidden: [N, E].
        lm_head: [V, E].
        tiles: int32 [], number of tiles to compute; later rows get NaN.
        wanted: bool []; if false, nothing is computed.
        rows: rows of a tile; at most `rows` x VOCAB_TILE logits exist at a time.
    """
    vocab = len(lm_head)
    step = min(VOCAB_TILE, vocab)

    def one(tile: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        these = part(hidden, tile * rows, rows)

        def add(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            most, total, best = state
            # The last tile starts earlier so that it is full; tokens of the tile before are masked.
            first = jnp.minimum(index * step, vocab - step)
            ids = first + jnp.arange(step)
            weights = part(lm_head, first, step)
            logits = contract(these, weights, ((1,), (1,)))  # [rows, step]
            logits = jnp.where(ids >= index * step, logits, -jnp.inf)
            top = logits.max(1)
            new = jnp.maximum(most, top)
            total = total * jnp.exp(most - new) + jnp.exp(logits - new[:, None]).sum(1)
            first_top = jnp.where(logits == top[:, None], ids, vocab - 1).min(1)
            return new, total, jnp.where(top > most, first_top, best)

        none = (jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros(rows, jnp.int32))
        most, total, best = lax.fori_loop(0, -(-vocab // step), add, none)
        found = (most + jnp.log(total), best, most)
        return jax.tree.map(lambda every, new: put(every, new, tile * rows), done, found)

    nan = jnp.full(len(hidden), jnp.nan)
    none = nan, jnp.zeros(len(hidden), jnp.int32), nan
    with jax.named_scope("vocab_statistics"):
        return lax.fori_loop(0, jnp.where(wanted, tiles, 0), one, none)


def label_logits(hidden: Array, lm_head: Array, rows: Array, ids: Array, count: Array) -> Array:
    """Return float32 [L]: the logit of token ids[i] of row rows[i], for the first `count` labels.

    Args:
        hidden: [N, E].
        lm_head: [V, E].
        rows, ids: int32 [L]; L is a multiple of LABEL_TILE.
        count: int32 [].
    """

    def one(tile: Array, done: Array) -> Array:
        first = tile * LABEL_TILE
        left, right = (
            chosen(x, part(places, first, LABEL_TILE)).astype(jnp.float32)
            for x, places in ((hidden, rows), (lm_head, ids))
        )
        return put(done, (left * right).sum(1), first)

    with jax.named_scope("label_logits"):
        tiles = lax.div(count + LABEL_TILE - 1, LABEL_TILE)
        return lax.fori_loop(0, tiles, one, jnp.zeros(len(ids), jnp.float32))
