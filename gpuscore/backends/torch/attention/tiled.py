"""Attention over tile tables: by our own Triton kernel, with one launch per layer for all segments
of all requests, or by plain torch, or on a CPU in C (`--attention torch`).

The tables encode the mask rule (`gpuscore.types.batch.visible_rows`). The plain form is slow: it
serves where there is no C compiler, and other attention backends are compared with it.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.buckets import Bucket, make_buckets
from gpuscore.backends.torch.compiler import Function
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import PackedBatch
from gpuscore_kernels.extend_attention.config import config_for
from gpuscore_kernels.extend_attention.table import (
    DeviceTiles,
    Layout,
    TablePlace,
    TileShape,
    TileTable,
    list_words,
    upload,
)
from gpuscore_kernels.extend_attention.tiles import TableBuilder
from gpuscore_kernels.row_functions.attention import KEYS

# Tables are kept for prompts of up to KEPT_TOKENS tokens, for up to KEPT lengths; one takes 24 KiB.
KEPT_TOKENS = 1024
KEPT = 512
ROWS = 192  # most tokens times heads of a tile of queries, outside of Triton
HOST = torch.device("cpu")


class TiledAttention:
    """An attention backend.

    Args:
        config, pool: what it computes, and where cached keys and values are.
        attend: the reference of `extend_attention`, or another form of it.
        shape: sizes of tiles.
        device: where `attend` reads tables.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pool: KVPool,
        attend: Function,
        shape: TileShape,
        device: torch.device,
    ) -> None:
        self.config = config
        self.pool = pool
        self.attend = attend
        self.shape = shape
        self.device = device
        self._kept: dict[tuple[int, bytes], list[TileTable]] = {}

    def buckets(self, most_tokens: int) -> list[Bucket]:
        return make_buckets(most_tokens, self.shape.rows)

    def tables(self, batch: PackedBatch) -> list[TileTable]:
        """Return a batch's tables, which callers must not change.

        Those of one whole prompt depend only on its length and its scored rows, and are kept:
        building them takes a third of the host's time for a prompt of 300 tokens.
        """
        one = len(batch.parent) == 1 and batch.num_tokens <= KEPT_TOKENS
        if not one or batch.prefix_lens.any():
            return build_tables(batch, self.config, self.pool.page_size, self.shape)
        key = batch.num_tokens, batch.score_rows.tobytes()
        tables = self._kept.get(key)
        if tables is None:
            tables = build_tables(batch, self.config, self.pool.page_size, self.shape)
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = tables
        return tables

    def tiles(self, tables: list[TileTable]) -> int:
        return max((len(table.tiles) for table in tables[:-1]), default=0)

    def list_words(self, tables: list[TileTable]) -> int:
        return list_words(tables)

    def places(self, sizes: Bucket, start: int) -> tuple[TablePlace, ...]:
        return table_places(len(table_windows(self.config)) + 1, sizes, start)

    def on_device(self, places: tuple[TablePlace, ...], words: Tensor) -> "TiledPass":
        windows = (*table_windows(self.config), self.config.windows[-1])
        tables = zip(places, windows, strict=True)
        return self._planned([place.on_device(words, self.shape, w) for place, w in tables])

    def prepare(self, batch: PackedBatch) -> "TiledPass":
        return self._planned(upload(self.tables(batch), self.device))

    def _planned(self, tables: list[DeviceTiles]) -> "TiledPass":
        return TiledPass(self, tables_of_layers(self.config, tables))


@dataclass(frozen=True, slots=True)
class TiledPass:
    """Attention of one batch."""

    backend: TiledAttention
    tables: list[DeviceTiles]  # of each layer
    read: None = None  # it reads cached keys where they are

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self.backend.config
        how = config.attention_scale, config.attention_softcap
        pool = self.backend.pool.layers[layer]
        out: Tensor = self.backend.attend((q, k, v), pool, self.tables[layer], *how)
        return out


class TritonAttention(TiledAttention):
    """Attention in Triton; with `steady`, a row's tiles do not depend on other rows."""

    def __init__(self, config: DecoderConfig, pool: KVPool, *, steady: bool) -> None:
        from gpuscore_kernels.extend_attention.triton import extend_attention  # needs Triton

        tiles = config_for(pool.device, config.head_dim, pool.dtype)
        tiles = tiles.steady() if steady else tiles
        shape = tiles.shape(config.num_heads // config.num_kv_heads)
        super().__init__(config, pool, partial(extend_attention, config=tiles), shape, pool.device)


class TorchAttention(TiledAttention):
    """Attention by plain torch, or in C; with `steady`, a row's bits do not depend on others."""

    def __init__(
        self, config: DecoderConfig, pool: KVPool, attend: Function, steady: bool = False
    ) -> None:
        tokens = max(1, ROWS // (config.num_heads // config.num_kv_heads))
        shape = TileShape(tokens, KEYS, KEYS, steady)
        super().__init__(config, pool, attend, shape, HOST)


def layout_of(batch: PackedBatch, page_size: int) -> Layout:
    """Return the parts of a batch that the kernels' tile tables are built from."""
    return Layout(
        positions=batch.positions,
        cu_seqlens=batch.cu_seqlens,
        parent=batch.parent,
        request_of=batch.request_of,
        prefix_lens=batch.prefix_lens,
        page_table=batch.page_table,
        page_size=page_size,
    )


def table_places(count: int, sizes: Bucket, start: int) -> tuple[TablePlace, ...]:
    """Return places of tables from a word on; the last one is the last layer's."""
    places: list[TablePlace] = []
    for rows, tiles in [sizes[:2]] * (count - 1) + [(sizes.scored, sizes.scored)]:
        places.append(TablePlace(rows, tiles, places[-1].end if places else start))
    return tuple(places)


def table_windows(config: DecoderConfig) -> list[int | None]:
    """Return the different windows of all layers but the last. Layers with the same window share a
    table; the last layer has its own."""
    return list(dict.fromkeys(config.windows[:-1]))


def build_tables(
    batch: PackedBatch,
    config: DecoderConfig,
    page_size: int,
    shape: TileShape,
) -> list[TileTable]:
    """Build one table of all rows for each of `table_windows`, then one of the scored rows."""
    builder = TableBuilder(layout_of(batch, page_size), shape)
    tables: list[TileTable] = []
    last: list[TileTable] = []
    for window in table_windows(config):
        rows = [None, batch.score_rows] if window == config.windows[-1] else [None]
        table, *last_here = builder.tables(rows, window)
        tables.append(table)
        last = last_here or last
    return [*tables, *(last or builder.tables([batch.score_rows], config.windows[-1]))]


def tables_of_layers(config: DecoderConfig, tables: list[DeviceTiles]) -> list[DeviceTiles]:
    """Return the table of each layer, from the tables that `build_tables` makes."""
    *others, last = tables
    by_window = dict(zip(table_windows(config), others, strict=True))
    return [*(by_window[window] for window in config.windows[:-1]), last]
