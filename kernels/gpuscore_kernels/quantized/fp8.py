"""The product of float8_e4m3fn by `torch.nn.functional.scaled_mm`, with a scale per row.

What a card computes was read in torch 2.13's sources (ScaledBlas.cpp, RowwiseScaledMM.cu) and
issues; only sm_90 was tried:

- sm_89: CUTLASS; sm_90: cuBLASLt. Both add up in float32.
- sm_120 is left out. The sources have a kernel for it, but a report says that such calls fail there
  (https://github.com/pytorch/pytorch/issues/192707).
"""

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

Capability: TypeAlias = tuple[int, int]

CAPABILITIES: tuple[Capability, ...] = ((8, 9), (9, 0))
MULTIPLE = 16  # both sizes of a weight have to be multiples of it
RESULTS = (torch.bfloat16, torch.float16)  # float32 takes no bias
_BY_ROW, _AS_IT_IS = [ScalingType.RowWise.value], list[int]()  # recipe of scales, and their order


def refusal(capability: Capability, outputs: int, width: int, dtype: torch.dtype) -> str | None:
    """Return why a card does not compute products with a weight [outputs, width]; None if it does.

    Args:
        capability: compute capability of the card, (9, 0) for sm_90.
        outputs, width: of the weight.
        dtype: of the result.
    """
    major, minor = capability
    if capability not in CAPABILITIES:
        return f"torch computes no FP8 with a scale per row on sm_{major}{minor}"
    if outputs % MULTIPLE or width % MULTIPLE:
        return f"FP8 weights [{outputs}, {width}] are not multiples of {MULTIPLE}"
    if dtype not in RESULTS:
        return f"FP8 products with a bias are not computed in {dtype}"
    return None


class Fp8Product:
    """The products of rows with one weight. Also runs on a CPU.

    A host launches four products in each layer. So everything that does not depend on the rows is
    checked and made here, once, and calls go to the operator behind
    `torch.nn.functional.scaled_mm`, a function that makes lists of numbers of its arguments every
    time.

    Args:
        w: [O, K], float8_e4m3fn, contiguous.
        scale_w: [O], float32.
        bias: [O] in the dtype of the products, or None.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """

    def __init__(self, w: Tensor, scale_w: Tensor, bias: Tensor | None) -> None:
        if w.dtype != torch.float8_e4m3fn or w.dim() != 2 or not w.is_contiguous():
            raise ValueError(
                f"scaled_mm takes contiguous rows of float8_e4m3fn, not {tuple(w.shape)} {w.dtype}"
            )
        if scale_w.shape != w.shape[:1] or scale_w.dtype != torch.float32:
            raise ValueError(
                f"scaled_mm takes one scale per output in float32, not {tuple(scale_w.shape)} "
                f"{scale_w.dtype} for {len(w)} outputs"
            )
        self._columns, self._scales, self._bias = w.T, [scale_w.unsqueeze(0)], bias

    def __call__(self, q: Tensor, scale_x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the products in `dtype`; q and scale_x are as in `quantized.quantized_product`."""
        rows = [scale_x.unsqueeze(1)]
        sides = rows, _BY_ROW, _AS_IT_IS, self._scales, _BY_ROW, _AS_IT_IS
        product: Tensor = torch._scaled_mm_v2(
            q, self._columns, *sides, self._bias, dtype, (), False
        )
        return product
