"""Attention by FlashAttention 4's kernel for Hopper; an optional package.

The cached keys of all requests are copied behind the keys of the batch (`qk_norm_rope_store`), so
that all keys are rows of one tensor. The rows that see a key are consecutive: from the key itself
to the last descendant of its segment, or, for a cached key, all rows of its request. So the
mask rule (`gpuscore.types.batch.visible_rows`) becomes two numbers for each key: the first row that
sees it, and the row after the last.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.buckets import Bucket, make_buckets
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.words import ArraySpec, WordPlaces
from gpuscore.types.batch import Int32Array, PackedBatch
from gpuscore_kernels.hopper import KEYS, ROWS, block_lists, load

MOST_BLOCKS = 128  # most blocks of cached keys in a CUDA graph: 16,384 keys
# Entries that are not slots, see `qk_norm_rope_store.Pages`.
ZEROS = -1
UNUSED = -2


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

    def tables(self, batch: PackedBatch) -> list[list[Int32Array]]:
        return [key_table(batch, self.pool.page_size)]

    def tiles(self, tables: list[list[Int32Array]]) -> int:
        return -(-len(tables[0][0]) // KEYS) - 1  # without the block of zeros

    def list_words(self, tables: list[list[Int32Array]]) -> int:
        return 0

    def places(self, sizes: Bucket, start: int) -> tuple[WordPlaces, ...]:
        """Return the places of a `key_table`, padded to whole blocks of keys. No row sees the keys
        of the padding."""
        cached = sizes.tiles * KEYS
        behind = -(-(sizes.tokens + cached) // KEYS) * KEYS - sizes.tokens
        slots = ArraySpec((cached,), UNUSED)
        scored = ArraySpec((sizes.scored,), sizes.tokens)
        specs = slots, scored, ArraySpec((sizes.tokens, 2)), ArraySpec((behind, 2))
        return (WordPlaces.of(specs, start),)

    def on_device(self, places: tuple[WordPlaces, ...], words: Tensor) -> "HopperPass":
        slots, scored, batch_keys, cached = places[0].views(words)
        every = torch.cat((batch_keys.T, cached.T), dim=1)
        last = torch.searchsorted(scored, every, out_int32=True)
        sides = (every, batch_keys.shape[0]), (last, scored.shape[0])
        rules = [(part, block_lists(part, rows, self.group)) for part, rows in sides]
        return HopperPass(self, slots, rules)


@dataclass(frozen=True, slots=True)
class HopperPass:
    """Attention of one batch."""

    backend: HopperAttention
    read: Tensor  # slots whose keys and values are copied behind the batch's rows in k and v
    rules: list[tuple[Tensor, tuple[Tensor, ...]]]  # masks for all rows, and for scored rows

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. Rows must be aligned to 16 bytes, and values finite even if no row sees them."""
        config = self.backend.config
        numbers, lists = self.rules[layer == config.num_layers - 1]
        out = torch.empty_like(q)
        if len(out):
            tensors = [x.unsqueeze(0) for x in (q, k, v, out)]
            blocks = *(x[None, None] for x in lists), *(None,) * 4
            # Each None is an unused argument: log-sum-exps, lengths, pages, windows, sinks.
            rule = *(None,) * 8, blocks, ((numbers,), None), None, None
            self.backend.kernel(*tensors, None, config.attention_scale, *rule)
        return out


def key_table(batch: PackedBatch, page_size: int) -> list[Int32Array]:
    """Return the keys of a batch, and the rows that see them.

    A cached prefix is listed once for each run of consecutive segments that have it.

    Returns:
        1. The pool's slots [P] of the cached keys, then `KEYS` entries for keys of zeros. They fill
           the last block that holds a key, so all numbers in that block are finite.
        2. The scored rows.
        3. For the key of each row, [T, 2]: the first row that sees it, and the row after the last.
        4. The same for each cached key, [P, 2].
    """
    starts = batch.cu_seqlens[:-1]
    ends = batch.cu_seqlens[1:]
    request = batch.request_of
    last_seen = ends.copy()  # the row after the last descendant of each segment
    ancestor = batch.parent
    while (children := (ancestor >= 0).nonzero()[0]).size:
        np.maximum.at(last_seen, ancestor[children], ends[children])
        ancestor = np.where(ancestor >= 0, batch.parent[ancestor], -1)
    batch_keys = np.column_stack([np.arange(batch.num_tokens), last_seen.repeat(ends - starts)])

    prefixes = np.column_stack([batch.prefix_lens, batch.page_table])
    last = np.diff(request).nonzero()[0]  # the last segment of every request except the last
    differ = (prefixes[request[last]] != prefixes[request[last + 1]]).any(1)
    first = np.append(0, last[differ] + 1)
    lengths = batch.prefix_lens[request[first]]
    run = np.arange(len(first)).repeat(lengths)
    page, offset = np.divmod(np.arange(len(run)) - (lengths.cumsum() - lengths)[run], page_size)
    slots = batch.page_table[request[first[run]], page] * page_size + offset

    bounds = batch.cu_seqlens[[*first, len(request)]]
    cached = np.column_stack([bounds[run], bounds[run + 1]])
    zeros = np.full(KEYS, ZEROS)
    arrays = np.concatenate([slots, zeros]), batch.score_rows, batch_keys, cached
    return [array.astype(np.int32) for array in arrays]
