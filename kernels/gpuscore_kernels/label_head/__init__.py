from gpuscore_kernels.label_head.api import (
    MAX_TOP,
    Products,
    VocabStatistics,
    few_products,
    label_logits,
    repeating_rows,
    tile_shapes,
    vocab_statistics,
)

__all__ = [
    "MAX_TOP",
    "Products",
    "VocabStatistics",
    "few_products",
    "label_logits",
    "repeating_rows",
    "tile_shapes",
    "vocab_statistics",
]
