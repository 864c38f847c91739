"""The known answer of the kernels for mixtures of experts (see `known_answer`)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.decoder import DecoderWeights
from gpuscore.backends.torch.known_answer import ROWS, Run
from gpuscore.backends.torch.mixture import MixtureWeights
from gpuscore_kernels.expert_mlp import expert_mlp
from gpuscore_kernels.routing import Routing, route
from gpuscore_kernels.routing.api import Implementation


def mixture_calls(model: DecoderConfig, weights: DecoderWeights) -> Iterator[tuple[str, Run]]:
    """Yield each kernel's name, and a function that calls it or its reference on the same rows.

    The first layer with a mixture is taken; without one there are no kernels. The last row is
    padding.
    """
    mlp = next((x.mlp for x in weights.layers if isinstance(x.mlp, MixtureWeights)), None)
    if mlp is None:
        return
    generator, mixture = torch.Generator().manual_seed(0), mlp.mixture
    x = torch.randn(ROWS, model.hidden_size, generator=generator).to(mlp.router)
    logits = _without_ties(ROWS, mixture.num_experts, generator).to(mlp.router)
    filled = torch.full((1,), ROWS - 1, dtype=torch.int32, device=x.device)

    def routing(impl: Implementation) -> Routing:
        return route(
            logits, top_k=mixture.top_k, norm_top_k=mixture.norm_top_k, filled=filled, impl=impl
        )

    def routes(impl: Implementation) -> tuple[Tensor, ...]:
        found = routing(impl)
        return found.weights, found.places.float(), found.starts.float()

    def results(impl: Implementation) -> tuple[Tensor, ...]:
        given = routing(impl)
        return (expert_mlp(x, given, mlp.gate_up, mlp.down, model.activation, impl=impl),)

    yield "route", routes
    yield "expert_mlp", results


def _without_ties(rows: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return logits [rows, experts] of which the 256 largest of each row differ in every dtype.

    Of equally probable experts an implementation may choose any.
    """
    ranks = torch.rand(rows, experts, generator=generator).argsort(dim=1)
    return (ranks - experts) / 16
