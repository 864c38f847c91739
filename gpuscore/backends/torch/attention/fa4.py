"""Attention by FlashAttention 4's kernel for Hopper; an optional package.

The cached keys of all requests are copied behind the keys of the batch (`qk_norm_rope_store`), so
that all keys are rows of one tensor. The rows that see a key are consecutive: from the key itself
to the last descendant of its segment, or, for a cached key, all rows of its request. So two numbers
for each key state the mask rule (`gpuscore.types.batch.visible_rows`).
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

MOST_BLOCKS = 128  # most blocks of cached keys in a CUDA graph: 16,384 keys
# Entries that are not slots, see `qk_norm_rope_store.Pages`.
ZEROS = -1
UNUSED = -2
NEVER = 2**31 - 1  # stands for the first row that sees a key, where no row does


class KeyTable(NamedTuple):
    """The keys of a batch: its T rows, then P cached keys."""

    slots: Int32Array  # [P] the cached keys' slots of the pool
    # [4, T + P] For each key: the first row that sees it and the row after the last. Then the same
    # two numbers, counted in scored rows.
    numbers: Int32Array


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
        """Write a table, padded with keys that no row sees; return `tail`."""
        used = len(table.slots)
        tokens = table.numbers.shape[1] - len(table.slots)
        slots, numbers = self.parts(words)
        slots[:used] = table.slots
        # The rest of the last block with a cached key is zeros, so that all its keys are finite.
        slots[used : used + KEYS] = ZEROS
        slots[used + KEYS :] = UNUSED
        numbers[::2] = NEVER
        numbers[1::2] = 0
        numbers[:, :tokens] = table.numbers[:, :tokens]
        numbers[:, self.sizes.tokens : self.sizes.tokens + used] = table.numbers[:, tokens:]
        return tail

    def parts(self, words: WordsT) -> tuple[WordsT, WordsT]:
        """Return the parts of `words` that hold the slots and the numbers."""
        slots, numbers = word_slices((self.cached, 4 * self.keys), self.start)
        return words[slots], words[numbers].reshape(4, self.keys)


class HopperAttention:
    """An attention backend for `GraphLauncher`; raises BuildError if the kernel cannot be built."""

    def __init__(self, config: DecoderConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool
        self.group = config.num_heads // config.num_kv_heads
        self.kernel = load("attention", config.head_dim, self.group)

    def buckets(self, most_tokens: int) -> list[Bucket]:
        """Return the sizes of the CUDA graphs. `tiles` are blocks of cached keys here."""
        all_sizes = make_buckets(most_tokens, ROWS // self.group)
        return sorted({b._replace(tiles=min(b.tiles, MOST_BLOCKS)) for b in all_sizes})

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
    read: Tensor  # slots whose keys and values are copied behind the batch's rows in k and v
    rules: list[tuple[Tensor, tuple[Tensor, ...]]]  # masks for all rows, and for scored rows

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self.backend.config
        rule = self.rules[layer == config.num_layers - 1]
        return attend(self.backend.kernel, (q, k, v), rule, config.attention_scale)


def key_table(batch: PackedBatch, page_size: int) -> KeyTable:
    """Return the keys of a batch, and the rows that see them.

    A cached prefix is listed once for each run of consecutive segments that have it.
    """
    starts = batch.cu_seqlens[:-1]
    ends = batch.cu_seqlens[1:]
    request = batch.request_of
    last_seen = ends.copy()  # the row after the last descendant of each segment
    ancestor = batch.parent
    while (children := (ancestor >= 0).nonzero()[0]).size:
        np.maximum.at(last_seen, ancestor[children], ends[children])
        ancestor = np.where(ancestor >= 0, batch.parent[ancestor], -1)
    batch_keys = np.stack([np.arange(batch.num_tokens), last_seen.repeat(ends - starts)])

    changed = (request[1:] != request[:-1]).nonzero()[0] + 1
    previous = request[changed - 1]
    current = request[changed]
    pages = batch.page_table
    differ = (pages[previous] != pages[current]).any(1)
    differ |= batch.prefix_lens[previous] != batch.prefix_lens[current]
    first = np.concatenate([[0], changed[differ]])
    lengths = batch.prefix_lens[request[first]]
    bounds = batch.cu_seqlens[[*first, len(request)]]
    run = np.arange(len(first)).repeat(lengths)
    page, offset = np.divmod(np.arange(len(run)) - (lengths.cumsum() - lengths)[run], page_size)
    slots = pages[request[first[run]], page] * page_size + offset

    rows = np.concatenate([batch_keys, [bounds[run], bounds[run + 1]]], axis=1)
    scored = np.bincount(batch.score_rows + 1, minlength=batch.num_tokens + 1).cumsum()
    return KeyTable(slots.astype(np.int32), np.concatenate([rows, scored[rows]]))
