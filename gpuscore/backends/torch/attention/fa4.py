"""Attention by FlashAttention 4's kernel for Hopper; an optional package.

Cached keys of all requests are copied behind the batch's own (`qk_norm_rope_store`), so that all
keys are rows of one tensor, and the mask rule (`gpuscore.types.batch.visible_rows`) is two numbers
of each key. They are right because the rows that see a key are consecutive: those from the key to
the end of its segment's descendants, or all of its request's.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.buckets import Bucket, make_buckets
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.words import Room, WordPlaces
from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels.hopper import KEYS, ROWS, attend, block_lists, load

MOST_BLOCKS = 128  # of cached keys in a batch that runs as a graph: 16,384 keys
ZEROS, UNUSED = -1, -2  # in place of slots (`qk_norm_rope_store.Pages`)


class HopperAttention:
    """An attention backend, for `GraphLauncher`; raises BuildError if the kernel is not there."""

    def __init__(self, config: DecoderConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool
        self.group = config.num_heads // config.num_kv_heads
        self.kernel = load("attention", config.head_dim, self.group)

    def buckets(self, most_tokens: int) -> list[Bucket]:
        """Return the sizes of graphs; in place of tiles there are blocks of cached keys."""
        made = make_buckets(most_tokens, ROWS // self.group)
        return sorted({b._replace(tiles=min(b.tiles, MOST_BLOCKS)) for b in made})

    def tables(self, batch: PackedBatch) -> list[list[Int32Array]]:
        return [key_table(batch, self.pool.page_size)]

    def tiles(self, tables: list[list[Int32Array]]) -> int:
        return -(-len(tables[0][0]) // KEYS) - 1  # without zeros

    def list_words(self, tables: list[list[Int32Array]]) -> int:
        return 0

    def places(self, sizes: Bucket, start: int) -> tuple[WordPlaces, ...]:
        """Return the places of a `key_table`, with room for blocks of keys; nobody sees the keys
        that fill it."""
        cached = sizes.tiles * KEYS
        behind = -(-(sizes.tokens + cached) // KEYS) * KEYS - sizes.tokens
        slots = Room((cached,), UNUSED)
        scored = Room((sizes.scored,), sizes.tokens)
        rooms = slots, scored, Room((2, sizes.tokens)), Room((2, behind))
        return (WordPlaces.of(rooms, start),)

    def on_device(self, places: tuple[WordPlaces, ...], words: Tensor) -> "HopperPass":
        slots, scored, own, cached = places[0].views(words)
        every = torch.cat((own, cached), dim=1)
        last = torch.searchsorted(scored, every, out_int32=True)
        sides = (every, own.shape[1]), (last, scored.shape[0])
        rules = [(part, block_lists(part, rows, self.group)) for part, rows in sides]
        return HopperPass(self, slots, rules)


@dataclass(frozen=True, slots=True)
class HopperPass:
    """Attention of one batch."""

    backend: HopperAttention
    read: Tensor  # slots, whose keys and values follow the batch's rows in k and v
    rules: list[tuple[Tensor, tuple[Tensor, ...]]]  # of all rows, and of the scored rows

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self.backend.config
        rule = self.rules[layer == config.num_layers - 1]
        return attend(self.backend.kernel, (q, k, v), rule, config.attention_scale)


def key_table(batch: PackedBatch, page_size: int) -> list[Int32Array]:
    """Return the keys of a batch and who sees them.

    A cached prefix stands there once for each run of segments that have it.

    Returns:
        The pool's slots [P] of cached keys, and behind them `KEYS` zeros: a block that holds a key
        holds none behind it that is not finite.
        The scored rows.
        Of each row's key [2, T], and of each cached one [2, P], the first row that sees it and the
        row behind the last.
    """
    starts = batch.cu_seqlens[:-1]
    ends = batch.cu_seqlens[1:]
    request = batch.request_of
    behind = ends.copy()
    above = batch.parent
    while (below := (above >= 0).nonzero()[0]).size:
        np.maximum.at(behind, above[below], ends[below])
        above = np.where(above >= 0, batch.parent[above], -1)
    own = np.stack([np.arange(batch.num_tokens), behind.repeat(ends - starts)])

    changed = (request[1:] != request[:-1]).nonzero()[0] + 1
    before = request[changed - 1]
    now = request[changed]
    pages = batch.page_table
    differ = (pages[before] != pages[now]).any(1)
    differ |= batch.prefix_lens[before] != batch.prefix_lens[now]
    first = np.concatenate([[0], changed[differ]])
    lengths = batch.prefix_lens[request[first]]
    bounds = batch.cu_seqlens[[*first, len(request)]]
    run = np.arange(len(first)).repeat(lengths)
    page, offset = np.divmod(np.arange(len(run)) - (lengths.cumsum() - lengths)[run], page_size)
    slots = pages[request[first[run]], page] * page_size + offset

    zeros = np.full(KEYS, ZEROS)
    cached = np.stack([bounds[run], bounds[run + 1]])
    arrays = np.concatenate([slots, zeros]), batch.score_rows, own, cached
    return [array.astype(np.int32) for array in arrays]
