"""Attention over tile tables: by our own Triton kernel, with one launch per layer for all segments
of all requests, or by plain torch, or on a CPU in C (`--attention torch`).

The tables encode the mask rule (`gpuscore.types.batch.visible_rows`). The plain form is slow: it
serves where there is no C compiler, and other attention backends are compared with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.buckets import Bucket, make_buckets
from gpuscore.backends.torch.compiler import Function
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import PackedBatch
from gpuscore_kernels.extend_attention import (
    DeviceTiles,
    Layout,
    TableBuilder,
    TablePlace,
    TileConfig,
    TileShape,
    TileTable,
    list_words,
    upload,
)
from gpuscore_kernels.extend_attention.config import config_for
from gpuscore_kernels.row_functions.attention import KEYS

# Tokens of a prompt, and prompts' lengths, whose tables are kept: up to some 24 KiB each.
KEPT_TOKENS = 1024
KEPT = 512


class TritonAttention:
    """An attention backend; with `steady`, a row's tiles do not depend on other rows."""

    def __init__(self, config: DecoderConfig, pool: KVPool, *, steady: bool) -> None:
        self.config = config
        self.pool = pool
        tile_config = config_for(pool.device, config.head_dim, pool.dtype)
        self.tile_config = tile_config.steady() if steady else tile_config
        self.shape = self.tile_config.shape(config.num_heads // config.num_kv_heads)
        self._kept: dict[tuple[int, bytes], list[TileTable]] = {}

    def buckets(self, most_tokens: int) -> list[Bucket]:
        return make_buckets(most_tokens, self.shape.rows)

    def tables(self, batch: PackedBatch) -> list[TileTable]:
        """Return a batch's tables, which nobody may change.

        Those of one whole prompt depend on its length and its scored rows alone, and are kept: to
        build them takes a third of the host's time for a prompt of 300 tokens.
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

    def on_device(self, places: tuple[TablePlace, ...], words: Tensor) -> "TritonPass":
        windows = (*table_windows(self.config), self.config.windows[-1])
        tables = zip(places, windows, strict=True)
        return self._planned([place.on_device(words, self.shape, w) for place, w in tables])

    def prepare(self, batch: PackedBatch) -> "TritonPass":
        return self._planned(upload(self.tables(batch), self.pool.device))

    def _planned(self, tables: list[DeviceTiles]) -> "TritonPass":
        of_layers = tables_of_layers(self.config, tables)
        return TritonPass(self.config, self.pool, self.tile_config, of_layers)


@dataclass(frozen=True, slots=True)
class TritonPass:
    """Attention of one batch."""

    config: DecoderConfig
    pool: KVPool
    tile_config: TileConfig
    tables: list[DeviceTiles]  # per layer
    read: None = None  # it reads cached keys where they are

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from gpuscore_kernels.extend_attention.triton import extend_attention  # needs Triton

        return extend_attention(
            (q, k, v),
            self.pool.layers[layer],
            self.tables[layer],
            scale=self.config.attention_scale,
            softcap=self.config.attention_softcap,
            config=self.tile_config,
        )


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


ROWS = 192  # of a tile of queries, if heads allow: tokens times the heads that share keys
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """An attention backend; with `steady`, a row's bits do not depend on other rows."""

    config: DecoderConfig
    pool: KVPool
    attend: Function  # the reference of `extend_attention`, or its form in C
    steady: bool = False

    def prepare(self, batch: PackedBatch) -> "TorchPass":
        config = self.config
        tokens = max(1, ROWS // (config.num_heads // config.num_kv_heads))
        shape = TileShape(tokens, KEYS, KEYS, self.steady)
        tables = upload(build_tables(batch, config, self.pool.page_size, shape), HOST)
        return TorchPass(self, tables_of_layers(config, tables))


@dataclass(frozen=True, slots=True)
class TorchPass:
    """Attention of one batch."""

    backend: TorchAttention
    tables: list[DeviceTiles]  # of each layer

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        backend = self.backend
        config = self.backend.config
        how = config.attention_scale, config.attention_softcap
        pool = backend.pool.layers[layer]
        table = self.tables[layer]
        out: Tensor = backend.attend((q, k, v), pool, table, *how)
        return out
