from gpuscore_kernels.label_head.api import label_logits, vocab_statistics

__all__ = ["label_logits", "vocab_statistics"]
