"""The columns of one row in which keys and values of all heads stand side by side.

A device stores the last dimension of an array in tiles of so many columns (`lanes`), 128 on a TPU.
There, heads of 64 share a tile, heads of 80 or 96 are padded to a whole one, and so is the row.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a model's heads, and the columns that they take."""

    query: int
    kv: int
    dim: int
    lanes: int  # 1 where nothing is padded

    @property
    def together(self) -> int:
        """KV heads that share `span` columns."""
        return self.lanes // self.dim if self.lanes % self.dim == 0 else 1

    @property
    def span(self) -> int:
        """Columns of heads that stand together; a multiple of `lanes`."""
        return -(-self.together * self.dim // self.lanes) * self.lanes

    @property
    def spans(self) -> int:
        return -(-self.kv // self.together)

    @property
    def width(self) -> int:
        """Columns of the keys of one token; its values take as many."""
        return self.spans * self.span

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query // self.kv

    def joined(self, k: Array, v: Array) -> Array:
        """Put keys and values side by side: two of [M, Hkv, D] -> [M, 2 * width]."""
        return jnp.concatenate([self._flat(k), self._flat(v)], axis=1)

    def parts(self, rows: Array) -> tuple[Array, Array]:
        """Undo `joined`: [M, 2 * width] -> keys and values [M, Hkv, D]."""
        sides = jnp.split(rows, 2, axis=1)
        k, v = (self._by_head(side) for side in sides)
        return k, v

    def spread(self, q: Array) -> Array:
        """Put each query head where its keys stand in their span, zeros beside it.

        Then a product over a whole span of keys scores a single head. [M, H, D] -> [M, H * span].
        """
        rows = len(q)
        if self.together == 1:
            return self._padded(q).reshape(rows, -1)
        split = q.reshape((rows, self.kv, self.group, 1, self.dim))
        placed = jnp.where(self._places(), split, 0)  # [M, Hkv, G, together, D]
        return placed.reshape(rows, -1)

    def gathered(self, out: Array) -> Array:
        """Undo `spread`, and drop the columns of other heads: [M, H * span] -> [M, H * D]."""
        rows = len(out)
        if self.together == 1:
            return out.reshape(rows, self.query, self.span)[..., : self.dim].reshape(rows, -1)
        split = out.reshape((rows, self.kv, self.group, self.together, self.dim))
        return jnp.where(self._places(), split, 0).sum(axis=3, dtype=out.dtype).reshape(rows, -1)

    def _places(self) -> Array:
        """Mark the place of each KV head in its span; bool [Hkv, 1, together, 1]."""
        places = jnp.arange(self.kv)[:, None] % self.together == jnp.arange(self.together)
        return places[:, None, :, None]

    def _flat(self, side: Array) -> Array:
        flat = self._padded(side).reshape(len(side), -1)
        return jnp.pad(flat, ((0, 0), (0, self.width - flat.shape[1])))

    def _padded(self, x: Array) -> Array:
        """Pad each head [M, heads, D] to `span`, unless several stand together."""
        missing = 0 if self.together > 1 else self.span - self.dim
        return x if not missing else jnp.pad(x, ((0, 0), (0, 0), (0, missing)))

    def _by_head(self, side: Array) -> Array:
        if self.together > 1:
            return side[:, : self.kv * self.dim].reshape(len(side), self.kv, self.dim)
        return side.reshape(len(side), self.kv, self.span)[..., : self.dim]
