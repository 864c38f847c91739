"""The known answers of products in eight bits (see `known_answer`)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.decoder import DecoderWeights
from gpuscore.backends.torch.known_answer import ROWS, Run
from gpuscore.backends.torch.linear import (
    Products,
    QuantizedLinear,
    QuantizedRows,
    rows_of,
)
from gpuscore_kernels.quantized import quantize_rows
from gpuscore_kernels.quantized.api import Implementation
from gpuscore_kernels.quantized.config import FEW_ROWS

OUTPUTS = 160  # of a weight in eight bits, more than a tile has; the reference needs much memory


def eight_bit_calls(
    model: DecoderConfig, weights: DecoderWeights, pdl: bool
) -> Iterator[tuple[str, Run]]:
    """Yield the same for the first layer's output projection, if it is in eight bits.

    Few rows and many have tiles of their own, except in Triton's interpreter.
    """
    layer = weights.layers[0]
    linear = rows_of(layer.o, 0, OUTPUTS) if isinstance(layer.o, QuantizedLinear) else layer.o
    if not isinstance(linear, QuantizedLinear):
        return
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(FEW_ROWS + 1, linear.weight.shape[1], generator=generator)
    yield from _row_calls(model, linear, x[:ROWS].to(layer.input_norm), pdl)
    for count in (ROWS, len(x)) if linear.weight.is_cuda else (ROWS,):
        some = x[:count].to(layer.input_norm)

        def product(impl: Implementation, x: Tensor = some) -> tuple[Tensor, ...]:
            return (Products(impl=impl, pdl=pdl)(linear, x),)

        yield "quantized_product", product


def _row_calls(
    model: DecoderConfig, linear: QuantizedLinear, x: Tensor, pdl: bool
) -> Iterator[tuple[str, Run]]:
    """Yield the same for what makes the rows of products in eight bits."""
    gate_up, weight = torch.cat((x, x.flip(1)), dim=1), x[0]
    eps, one_plus = model.rms_norm_eps, model.one_plus_norms

    def rows(impl: Implementation) -> tuple[Tensor, ...]:
        q, scale = quantize_rows(x, linear.weight.dtype, pdl=pdl, impl=impl)
        return (_as_numbers(QuantizedRows(q, scale, x.dtype)),)

    def norm(impl: Implementation) -> tuple[Tensor, ...]:
        products = Products(impl=impl, pdl=pdl)
        total, normed = products.norm(linear, x, x.flip(1), weight, eps, one_plus)
        return total, _as_numbers(normed)

    def gated(impl: Implementation) -> tuple[Tensor, ...]:
        products = Products(impl=impl, pdl=pdl)
        return (_as_numbers(products.gated(linear, gate_up, model.activation)),)

    yield from (("quantize_rows", rows), ("quantized_norm", norm), ("quantized_gated", gated))


def _as_numbers(rows: QuantizedRows) -> Tensor:
    return (rows.q.float() * rows.scale[:, None]).to(rows.dtype)
