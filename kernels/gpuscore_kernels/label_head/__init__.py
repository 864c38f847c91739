from gpuscore_kernels.label_head.api import (
    VocabStatistics,
    label_logits,
    repeating_rows,
    tile_shapes,
    vocab_statistics,
)

__all__ = ["VocabStatistics", "label_logits", "repeating_rows", "tile_shapes", "vocab_statistics"]
