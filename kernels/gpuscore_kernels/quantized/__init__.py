from gpuscore_kernels.quantized.api import quantize_rows, quantized_product

__all__ = ["quantize_rows", "quantized_product"]
