from gpuscore_kernels.label_head.api import label_logits, tile_shapes, vocab_statistics

__all__ = ["label_logits", "tile_shapes", "vocab_statistics"]
