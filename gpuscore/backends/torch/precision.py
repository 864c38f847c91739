"""The precision of torch's matrix products."""

import torch


def sum_in_float32() -> None:
    """Keep cuBLAS from adding the partial sums of a product in bfloat16 or float16.

    torch allows that by default where a product is split along its sums, which happens to products
    of few rows. The setting is of the whole process. TF32 is off by default, and stays as it is.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
