"""Label logits and full-vocabulary statistics in float32, a tile of the logits at a time."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.jax.products import as_bits, contract, part, put, rows_at
from gpuscore.types.request import MAX_TOP

VOCAB_TILE = 4096
LABEL_TILE = 64
# The statistics that a batch needs: none, up to one most probable token, or MAX_TOP of them.
NOTHING, ONE, MANY = range(3)


def vocab_statistics(
    hidden: Array, lm_head: Array, tiles: Array, statistics: Array, rows: int
) -> tuple[Array, Array, Array]:
    """Return each row's log-sum-exp, float32 [N], and its most probable tokens with their logits.

    Tokens and logits are [N, MAX_TOP], the largest first, lower ids first on a tie. Only MANY
    writes more than the first column. Places after the last token hold -inf.

    Args:
        hidden: [N, E].
        lm_head: [V, E].
        tiles: int32 [], number of tiles to compute; later rows get NaN.
        statistics: int32 []; NOTHING: no tile is computed; ONE: one token for each row; MANY: all.
        rows: rows of a tile; at most `rows` x VOCAB_TILE logits exist at a time.
    """
    vocab = len(lm_head)
    step = min(VOCAB_TILE, vocab)

    def compute_tile(tile: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        these = part(hidden, tile * rows, rows)

        def add(index: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            most, total, *so_far = state
            # The last tile starts earlier so that it is full; tokens of the tile before are masked.
            first = jnp.minimum(index * step, vocab - step)
            ids = first + jnp.arange(step)
            weights = as_bits(lm_head, partial(part, start=first, size=step))
            logits = contract(these, weights, ((1,), (1,)))  # [rows, step]
            logits = jnp.where(ids >= index * step, logits, -jnp.inf)
            top = logits.max(1)
            new = jnp.maximum(most, top)
            total = total * jnp.exp(most - new) + jnp.exp(logits - new[:, None]).sum(1)

            def with_one(ids_so_far: Array, logits_so_far: Array) -> tuple[Array, Array]:
                first_top = jnp.where(logits == top[:, None], ids, vocab - 1).min(1)
                best = jnp.where(top > most, first_top, ids_so_far[:, 0])
                return ids_so_far.at[:, 0].set(best), logits_so_far.at[:, 0].set(new)

            def with_many(ids_so_far: Array, logits_so_far: Array) -> tuple[Array, Array]:
                # Of equal values `top_k` takes the first, which have the lower ids.
                values, places = lax.top_k(logits, min(MAX_TOP, step))
                values = jnp.concatenate((logits_so_far, values), 1)
                values, chosen_places = lax.top_k(values, MAX_TOP)
                together = jnp.concatenate((ids_so_far, ids[places]), 1)
                return jnp.take_along_axis(together, chosen_places, 1), values

            tops = lax.cond(statistics == MANY, with_many, with_one, *so_far)
            return new, total, *tops

        empty = jnp.zeros((rows, MAX_TOP), jnp.int32), jnp.full((rows, MAX_TOP), -jnp.inf)
        none = (jnp.full(rows, -jnp.inf), jnp.zeros(rows), *empty)
        most, total, *tops = lax.fori_loop(0, -(-vocab // step), add, none)
        results = (most + jnp.log(total), *tops)
        return jax.tree.map(lambda every, new: put(every, new, tile * rows), done, results)

    shape = (len(hidden), MAX_TOP)
    none = jnp.full(len(hidden), jnp.nan), jnp.zeros(shape, jnp.int32), jnp.full(shape, jnp.nan)
    with jax.named_scope("vocab_statistics"):
        return lax.fori_loop(0, jnp.where(statistics == NOTHING, 0, tiles), compute_tile, none)


def label_logits(hidden: Array, lm_head: Array, rows: Array, ids: Array, count: Array) -> Array:
    """Return float32 [L]: the logit of token ids[i] of row rows[i], for the first `count` labels.

    Args:
        hidden: [N, E].
        lm_head: [V, E].
        rows, ids: int32 [L]; L is a multiple of LABEL_TILE.
        count: int32 [].
    """

    def compute_tile(tile: Array, done: Array) -> Array:
        first = tile * LABEL_TILE
        left, right = (
            rows_at(x, part(places, first, LABEL_TILE)).astype(jnp.float32)
            for x, places in ((hidden, rows), (lm_head, ids))
        )
        return put(done, (left * right).sum(1), first)

    with jax.named_scope("label_logits"):
        tiles = lax.div(count + LABEL_TILE - 1, LABEL_TILE)
        return lax.fori_loop(0, tiles, compute_tile, jnp.zeros(len(ids), jnp.float32))
