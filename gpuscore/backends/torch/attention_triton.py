"""Attention by our own Triton kernel: one launch per layer for all segments of all requests."""

from dataclasses import dataclass

from torch import Tensor

from gpuscore.backends.torch.hf_config import DecoderConfig
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types import PackedBatch
from gpuscore_kernels.extend_attention import (
    DeviceTiles,
    Layout,
    TileConfig,
    build_tiles,
    extend_attention,
    upload,
)
from gpuscore_kernels.extend_attention.config import config_for


class TritonAttention:
    """An attention backend; with `steady`, a row's tiles do not depend on its neighbours."""

    def __init__(self, config: DecoderConfig, pool: KVPool, *, steady: bool) -> None:
        self.config, self.pool = config, pool
        tile_config = config_for(pool.device, config.head_dim, pool.dtype)
        self.tile_config = tile_config.steady() if steady else tile_config

    def plan(self, batch: PackedBatch) -> "PlannedTriton":
        return PlannedTriton(
            self.config,
            self.pool,
            self.tile_config,
            layer_tables(batch, self.config, self.pool, self.tile_config, shared=True),
        )


@dataclass(frozen=True, slots=True)
class PlannedTriton:
    """Attention of one batch."""

    config: DecoderConfig
    pool: KVPool
    tile_config: TileConfig
    tables: list[DeviceTiles]  # of each layer

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = extend_attention(
            q,
            k,
            v,
            *self.pool.layers[layer],
            self.tables[layer],
            scale=self.config.attention_scale,
            softcap=self.config.attention_softcap,
            config=self.tile_config,
            impl="triton",
        )
        return out


def layout_of(batch: PackedBatch, page_size: int) -> Layout:
    """What the kernels' tile tables are made of."""
    return Layout(
        batch.positions,
        batch.cu_seqlens,
        batch.parent,
        batch.request_of,
        batch.prefix_lens,
        batch.page_table,
        page_size,
    )


def layer_tables(
    batch: PackedBatch,
    config: DecoderConfig,
    pool: KVPool,
    tile_config: TileConfig,
    *,
    shared: bool,
) -> list[DeviceTiles]:
    """The tile table of each layer; one is made for each window, and one for the last layer."""
    layout = layout_of(batch, pool.page_size)
    shape = tile_config.shape(config.num_heads // config.num_kv_heads)
    *others, last = config.windows
    windows = list(dict.fromkeys(others))
    tables = [build_tiles(layout, shape, window=window, shared=shared) for window in windows]
    scored = build_tiles(layout, shape, rows=batch.score_rows, window=last, shared=shared)
    *uploaded, uploaded_last = upload([*tables, scored], pool.device)
    by_window = dict(zip(windows, uploaded, strict=True))
    return [*(by_window[window] for window in others), uploaded_last]
