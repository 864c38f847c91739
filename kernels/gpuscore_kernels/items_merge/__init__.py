from gpuscore_kernels.items_merge.api import items_merge

__all__ = ["items_merge"]
