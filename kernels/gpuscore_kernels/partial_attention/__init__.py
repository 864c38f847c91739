from gpuscore_kernels.partial_attention.api import merge_partials, partial_attention

__all__ = ["merge_partials", "partial_attention"]
