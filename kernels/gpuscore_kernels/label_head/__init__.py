from gpuscore_kernels.label_head.api import label_logits, vocab_statistics
from gpuscore_kernels.label_head.reference import tile_shapes

__all__ = ["label_logits", "tile_shapes", "vocab_statistics"]
