from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.extend_attention.table import (
    DeviceTiles,
    Layout,
    TablePlace,
    TileShape,
    TileTable,
    aligned,
    list_words,
    upload,
    word_slices,
)
from gpuscore_kernels.extend_attention.tiles import TableBuilder

__all__ = [
    "DeviceTiles",
    "Layout",
    "TableBuilder",
    "TablePlace",
    "TileConfig",
    "TileShape",
    "TileTable",
    "aligned",
    "list_words",
    "upload",
    "word_slices",
]
