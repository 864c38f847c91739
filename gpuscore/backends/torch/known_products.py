"""The known answers of the fused products (see `known_answer`)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.decoder import DecoderWeights, MlpWeights
from gpuscore.backends.torch.known_answer import ROWS, Run
from gpuscore.backends.torch.linear import dense_weights
from gpuscore_kernels.fused_products import gated_product, heads_product
from gpuscore_kernels.fused_products.api import Implementation


def fused_calls(
    model: DecoderConfig, weights: DecoderWeights, pdl: bool
) -> Iterator[tuple[str, Run]]:
    """Yield each fused product's name, and a function that calls it or its reference.

    Rows are random; the weights are those of the first layer.
    """
    generator, layer = torch.Generator().manual_seed(1), weights.layers[0]

    def rows(columns: int) -> Tensor:
        return torch.randn(ROWS, columns, generator=generator).to(layer.input_norm)

    x = rows(model.hidden_size)
    cos, sin = rows(model.head_dim // 2).float(), rows(model.head_dim // 2).float()

    def heads(impl: Implementation) -> tuple[Tensor, ...]:
        return heads_product(
            x,
            *dense_weights(layer.qkv),
            cos,
            sin,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=model.rms_norm_eps,
            one_plus=model.one_plus_norms,
            pdl=pdl,
            impl=impl,
        )

    yield "heads_product", heads
    mlp = layer.mlp
    if not isinstance(mlp, MlpWeights):
        return

    def inner(impl: Implementation) -> tuple[Tensor, ...]:
        activation = model.activation
        weight, bias = dense_weights(mlp.gate_up)
        return (gated_product(x, weight, bias, activation=activation, pdl=pdl, impl=impl),)

    yield "gated_product", inner
