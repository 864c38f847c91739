from gpuscore_kernels.qk_norm_rope_store.api import qk_norm_rope_store
from gpuscore_kernels.qk_norm_rope_store.pages import Pages

__all__ = ["Pages", "qk_norm_rope_store"]
