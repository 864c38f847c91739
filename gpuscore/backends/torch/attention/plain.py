"""Attention on any device by plain torch, or on a CPU in C: `--attention torch`.

Both read the tile tables of our Triton kernel. The plain form is slow: it serves where there is no
C compiler, and other attention backends are compared with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.triton import build_tables, tables_of_layers
from gpuscore.backends.torch.compiler import Function
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import PackedBatch
from gpuscore_kernels.extend_attention import DeviceTiles, TileShape, upload
from gpuscore_kernels.row_functions.attention import KEYS

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
        backend, config = self.backend, self.backend.config
        how = config.attention_scale, config.attention_softcap
        pool, table = backend.pool.layers[layer], self.tables[layer]
        out: Tensor = backend.attend((q, k, v), pool, table, *how)
        return out
