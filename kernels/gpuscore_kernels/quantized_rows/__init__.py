from gpuscore_kernels.quantized_rows.api import quantized_gated, quantized_norm

__all__ = ["quantized_gated", "quantized_norm"]
