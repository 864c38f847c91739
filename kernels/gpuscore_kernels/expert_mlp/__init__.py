from gpuscore_kernels.expert_mlp.api import expert_mlp

__all__ = ["expert_mlp"]
