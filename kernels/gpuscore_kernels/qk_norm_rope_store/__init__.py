from gpuscore_kernels.qk_norm_rope_store.api import Pages, qk_norm_rope_store

__all__ = ["Pages", "qk_norm_rope_store"]
