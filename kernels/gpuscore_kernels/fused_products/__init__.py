from gpuscore_kernels.fused_products.api import gated_product, heads_product

__all__ = ["gated_product", "heads_product"]
