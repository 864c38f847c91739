from gpuscore_kernels.gated.api import gated

__all__ = ["gated"]
