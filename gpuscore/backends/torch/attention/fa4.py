"""Attention by FlashAttention 4's kernel for Hopper; an optional package.

Cached keys of all requests are copied behind the batch's own (`qk_norm_rope_store`), so that all
keys are rows of one tensor, and the mask rule (`gpuscore.types.batch.visible_rows`) is two numbers
of each key. They are right because the rows that see a key are consecutive: those from the key to
the end of its segment's descendants, or all of its request's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.buckets import Bucket, make_buckets
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels.extend_attention import aligned, word_slices
from gpuscore_kernels.extend_attention.table import WordsT
from gpuscore_kernels.hopper import KEYS, ROWS, attend, block_lists, load

MOST_BLOCKS = 128  # of cached keys in a batch that runs as a graph: 16,384 keys
ZEROS, UNUSED = -1, -2  # in place of slots (`qk_norm_rope_store.Pages`)
NEVER = 2**31 - 1  # the first row that sees a key which no row sees


class KeyTable(NamedTuple):
    """Keys of a batch: its T rows, then P cached ones."""

    slots: Int32Array  # [P] of the pool
    numbers: Int32Array  # [4, T + P] first row that sees the key, row behind; among scored rows


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The place of a `KeyTable` in an array of words, with room for blocks of cached keys."""

    sizes: Bucket
    start: int

    @property
    def cached(self) -> int:
        return self.sizes.tiles * KEYS

    @property
    def keys(self) -> int:
        return -(-(self.sizes.tokens + self.cached) // KEYS) * KEYS

    @property
    def end(self) -> int:
        return aligned(self.start + self.cached + 4 * self.keys)

    def write(self, table: KeyTable, words: Int32Array, tail: int) -> int:
        """Write a table that fits, padded with keys that no row sees; return `tail`."""
        used = len(table.slots)
        tokens = table.numbers.shape[1] - len(table.slots)
        slots, numbers = self.parts(words)
        slots[:used] = table.slots
        # A block that holds a cached key holds no key behind it that is not finite.
        slots[used : used + KEYS] = ZEROS
        slots[used + KEYS :] = UNUSED
        numbers[::2] = NEVER
        numbers[1::2] = 0
        numbers[:, :tokens] = table.numbers[:, :tokens]
        numbers[:, self.sizes.tokens : self.sizes.tokens + used] = table.numbers[:, tokens:]
        return tail

    def parts(self, words: WordsT) -> tuple[WordsT, WordsT]:
        """Return the places of slots and numbers."""
        slots, numbers = word_slices((self.cached, 4 * self.keys), self.start)
        return words[slots], words[numbers].reshape(4, self.keys)


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

    def tables(self, batch: PackedBatch) -> list[KeyTable]:
        return [key_table(batch, self.pool.page_size)]

    def tiles(self, tables: list[KeyTable]) -> int:
        return -(-len(tables[0].slots) // KEYS)

    def list_words(self, tables: list[KeyTable]) -> int:
        return 0

    def places(self, sizes: Bucket, start: int) -> tuple[KeyPlace, ...]:
        return (KeyPlace(sizes, start),)

    def on_device(self, places: tuple[KeyPlace, ...], words: Tensor) -> "HopperPass":
        (place,) = places
        slots, numbers = place.parts(words)
        sides = (numbers[:2], place.sizes.tokens), (numbers[2:], place.sizes.scored)
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


def key_table(batch: PackedBatch, page_size: int) -> KeyTable:
    """Return the keys of a batch and who sees them.

    A cached prefix stands there once for each run of segments that have it.
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

    rows = np.concatenate([own, [bounds[run], bounds[run + 1]]], axis=1)
    scored = np.bincount(batch.score_rows + 1, minlength=batch.num_tokens + 1).cumsum()
    return KeyTable(slots.astype(np.int32), np.concatenate([rows, scored[rows]]))
