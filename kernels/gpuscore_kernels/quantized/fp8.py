"""The product of float8_e4m3fn by `torch.nn.functional.scaled_mm`, with a scale per row.

What a card computes was read in torch 2.13's sources (ScaledBlas.cpp, RowwiseScaledMM.cu) and
issues; only sm_90 was tried:

- sm_89: CUTLASS; sm_90: cuBLASLt; sm_100 and sm_103: CUTLASS. All add up in float32.
- sm_120 is left out. The sources have a kernel for it, but a report says that such calls fail there
  (https://github.com/pytorch/pytorch/issues/192707).
- Weights with a scale for each block of 128 x 128 only on sm_90, and only with rows that have one
  for every 128 elements. Rows here have one scale, so such weights are not for this function.
"""

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

Capability: TypeAlias = tuple[int, int]

CAPABILITIES: tuple[Capability, ...] = ((8, 9), (9, 0), (10, 0), (10, 3))
MULTIPLE = 16  # of which both sizes of a weight have to be multiples
RESULTS = (torch.bfloat16, torch.float16)  # float32 takes no bias


def refusal(
    capability: Capability, outputs: int, width: int, dtype: torch.dtype, *, blocks: bool
) -> str | None:
    """Return why a card does not compute products with a weight [outputs, width]; None if it does.

    Args:
        capability: compute capability of the card, (9, 0) for sm_90.
        outputs, width: of the weight.
        dtype: of the result.
        blocks: the weight has a scale per block instead of one per output.
    """
    major, minor = capability
    if capability not in CAPABILITIES:
        return f"torch computes no FP8 with a scale per row on sm_{major}{minor}"
    if blocks:
        return "torch computes no FP8 with a scale per row and one per block of weights"
    if outputs % MULTIPLE or width % MULTIPLE:
        return f"FP8 weights [{outputs}, {width}] are not multiples of {MULTIPLE}"
    if dtype not in RESULTS:
        return f"FP8 products with a bias are not computed in {dtype}"
    return None


def quantized_product(
    q: Tensor, scale_x: Tensor, w: Tensor, scale_w: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product; see `quantized.api`. Also runs on a CPU.

    Raises:
        ValueError: it is not computed for these dtypes and sizes, or on this card.
    """
    if q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scaled_mm is for float8_e4m3fn, not for {q.dtype}")
    if q.device.type == "cuda":
        capability = torch.cuda.get_device_capability(q.device)
        (outputs, width), blocks = w.shape, scale_w.dim() == 2
        reason = refusal(capability, outputs, width, dtype, blocks=blocks)
        if reason is not None:
            raise ValueError(reason)
    elif scale_w.dim() == 2:
        raise ValueError("scaled_mm takes one scale per output, not one per block")
    recipe = ScalingType.RowWise
    scales = scale_x.unsqueeze(1), recipe, scale_w.unsqueeze(0), recipe
    product: Tensor = scaled_mm(q, w.T, *scales, bias=bias, output_dtype=dtype)
    return product
