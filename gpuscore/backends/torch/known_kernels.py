"""A check at start that Triton's kernels agree with their references on this machine."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.compiler import Function
from gpuscore.backends.torch.decoder import DecoderWeights
from gpuscore.backends.torch.kernels import in_triton
from gpuscore.backends.torch.known_answer import TOLERANCE, compare
from gpuscore.backends.torch.linear import (
    Products,
    QuantizedLinear,
    QuantizedRows,
    rows_of,
)
from gpuscore.backends.torch.mixture import MixtureWeights
from gpuscore_kernels import Implementation
from gpuscore_kernels.add_rms_norm import add_rms_norm
from gpuscore_kernels.delta_net import LONGEST, Walks
from gpuscore_kernels.delta_net.reference import convolve, delta_rule, gated_norm
from gpuscore_kernels.expert_mlp import expert_mlp
from gpuscore_kernels.gated import gated
from gpuscore_kernels.label_head import label_logits, vocab_statistics
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from gpuscore_kernels.quantized import quantize_rows
from gpuscore_kernels.quantized.config import FEW_ROWS
from gpuscore_kernels.routing import Routing, route
from gpuscore_kernels.slice_merge import MAX_TOP

Run: TypeAlias = Callable[[Implementation], tuple[Tensor, ...]]

ROWS = 33  # rows of the inputs of kernels
OUTPUTS = 160  # of a weight in eight bits, more than a tile has; the reference needs much memory


def check_kernels(model: DecoderConfig, weights: DecoderWeights) -> None:
    """Raise ConfigError if a kernel of `--kernels triton` differs from its reference.

    Args:
        model, weights: norms of the first layer with attention, the first linear layer and the
            label head are taken from them; rows are random.
    """
    with torch.inference_mode():
        for name, run in chain(
            _kernel_calls(model, weights),
            _mixture_calls(model, weights),
            _linear_calls(model, weights),
            _eight_bit_calls(model, weights),
        ):
            for expected, got in zip(run("reference"), run("triton"), strict=True):
                compare("--kernels triton", f" in {name}", got, expected, TOLERANCE[expected.dtype])


def _kernel_calls(model: DecoderConfig, weights: DecoderWeights) -> Iterator[tuple[str, Run]]:
    """Yield each kernel's name, and a function that calls it or its reference on the same rows."""
    generator, head = torch.Generator().manual_seed(0), weights.lm_head
    eps, one_plus = model.rms_norm_eps, model.one_plus_norms
    heads, kv_heads = model.num_heads, model.num_kv_heads
    layer = next((x for x in weights.layers if x.delta is None), weights.layers[0])

    def rows(columns: int) -> Tensor:
        return torch.randn(ROWS, columns, generator=generator).to(head)

    x, delta, gate_up = rows(model.hidden_size), rows(model.hidden_size), rows(2 * head.shape[1])
    qkv = rows((heads + 2 * kv_heads) * model.head_dim)
    cos, sin = rows(model.head_dim // 2).float(), rows(model.head_dim // 2).float()
    chosen = torch.arange(0, ROWS, 2, device=head.device)
    labels = chosen * 7919 % len(head)

    def with_pages(impl: Implementation) -> tuple[Tensor, ...]:
        k, v = (qkv.new_zeros(kv_heads, 2 * ROWS, model.head_dim) for _ in range(2))
        slots = torch.arange(-2, ROWS - 2, device=head.device) * 2
        heads_of_rows = qk_norm_rope_store(
            qkv,
            cos,
            sin,
            num_heads=heads,
            num_kv_heads=kv_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=eps,
            one_plus=one_plus,
            pages=Pages(k, v, slots),
            impl=impl,
        )
        return *heads_of_rows, k, v

    many, cap = min(MAX_TOP, len(head)), model.final_softcap

    def statistics(num_top: int, impl: Implementation) -> tuple[Tensor, ...]:
        computed = vocab_statistics(x, head, chosen, num_top=num_top, softcap=cap, impl=impl)
        lse, top, top_logits = computed
        assert top is not None and top_logits is not None  # noqa: S101, PT018  (it was asked for)
        # Ids may differ where two tokens are as likely; their logits may not.
        rows = chosen.repeat_interleave(num_top)
        best = label_logits(x, head, rows, top.reshape(-1), softcap=cap, impl="reference")
        return lse, best, top_logits.reshape(-1)

    def logits(impl: Implementation) -> tuple[Tensor, ...]:
        return (label_logits(x, head, chosen, labels, softcap=cap, impl=impl),)

    def norm(impl: Implementation) -> tuple[Tensor, ...]:
        weight, stream = layer.input_norm, x.float()
        return add_rms_norm(stream, delta, weight, eps=eps, one_plus=one_plus, impl=impl)

    yield "add_rms_norm", norm
    yield "gated", lambda i: (gated(gate_up, model.activation, impl=i),)
    yield "qk_norm_rope_store", with_pages
    yield "label_logits", logits
    yield "vocab_statistics", lambda i: statistics(1, i)
    yield "vocab_statistics with many tokens", lambda i: statistics(many, i)


def _mixture_calls(model: DecoderConfig, weights: DecoderWeights) -> Iterator[tuple[str, Run]]:
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
        routed = routing(impl)
        return routed.weights, routed.places.float(), routed.starts.float()

    def results(impl: Implementation) -> tuple[Tensor, ...]:
        routed = routing(impl)
        return (expert_mlp(x, routed, mlp.gate_up, mlp.down, model.activation, impl=impl),)

    yield "route", routes
    yield "expert_mlp", results


def _linear_calls(model: DecoderConfig, weights: DecoderWeights) -> Iterator[tuple[str, Run]]:
    """Yield each kernel's name, and a function that calls it or its reference, as above.

    One walk of two chunks begins with a state, and one with what it ends with.
    """
    delta = next((x.delta for x in weights.layers if x.delta is not None), None)
    net = model.delta_net
    if delta is None or net is None:
        return
    generator, device = torch.Generator().manual_seed(3), delta.conv.device
    heads, longest = net.num_value_heads, LONGEST["triton"]
    count = longest + 2 * ROWS

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def table(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    mixed = random(count, net.convolved).to(weights.embed)
    tails = random(1, net.kernel - 1, net.convolved).to(mixed)
    ago = torch.arange(1 - net.kernel, 0, device=device)
    places = (torch.arange(count, device=device)[:, None] + ago).clamp(min=-2).int()
    sizes = net.num_key_heads * net.key_dim, net.key_dim
    values, gate = random(ROWS, heads, net.value_dim), random(ROWS, heads * net.value_dim)
    gates, norm = random(count, 2 * heads).to(mixed), (delta.norm, model.rms_norm_eps)
    states = random(2, net.num_key_heads, net.key_dim, heads // net.num_key_heads * net.value_dim)
    walks = Walks(
        table(0, -1, -1, -1, longest, -2, -1, -1, longest + ROWS, 1, -1, -1, count, -1, -1, -1),
        table(0, 2, 0, 2, 3, -2).view(2, 3),
        levels=(1, 1),
        held=1,
    )
    convolved = convolve(mixed, tails, places, delta.conv, *sizes)

    def run(function: Function, *arguments: object) -> Run:
        return lambda impl: ((in_triton(function) if impl == "triton" else function)(*arguments),)

    def rule(impl: Implementation) -> tuple[Tensor, ...]:
        pool = states.clone()
        tensors = convolved, gates, delta.decay, delta.bias, walks, pool
        return *run(delta_rule, *tensors)(impl), pool

    yield "convolve", run(convolve, mixed, tails, places, delta.conv, *sizes)
    yield "delta_rule", rule
    yield "gated_norm", run(gated_norm, values, gate.to(mixed), *norm)


def _without_ties(rows: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return logits [rows, experts]; the 256 largest of each row differ in every dtype.

    Among equally probable experts an implementation may choose any.
    """
    ranks = torch.rand(rows, experts, generator=generator).argsort(dim=1)
    return (ranks - experts) / 16


def _eight_bit_calls(model: DecoderConfig, weights: DecoderWeights) -> Iterator[tuple[str, Run]]:
    """Yield kernels and functions, as above, for the first output projection in eight bits.

    Few rows and many rows have different tiles, except in Triton's interpreter.
    """
    layer = weights.layers[0]
    linear = rows_of(layer.o, 0, OUTPUTS) if isinstance(layer.o, QuantizedLinear) else layer.o
    if not isinstance(linear, QuantizedLinear):
        return
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(FEW_ROWS + 1, linear.weight.shape[1], generator=generator)
    yield from _row_calls(model, linear, x[:ROWS].to(layer.input_norm))
    for count in (ROWS, len(x)) if linear.weight.is_cuda else (ROWS,):
        some = x[:count].to(layer.input_norm)

        def product(impl: Implementation, x: Tensor = some) -> tuple[Tensor, ...]:
            return (Products(impl=impl)(linear, x),)

        yield "quantized_product", product


def _row_calls(
    model: DecoderConfig, linear: QuantizedLinear, x: Tensor
) -> Iterator[tuple[str, Run]]:
    """Yield kernels and functions, as above, that make the rows of products in eight bits."""
    gate_up, weight = torch.cat((x, x.flip(1)), dim=1), x[0]
    eps, one_plus = model.rms_norm_eps, model.one_plus_norms

    def rows(impl: Implementation) -> tuple[Tensor, ...]:
        q, scale = quantize_rows(x, linear.weight.dtype, impl=impl)
        return (_as_numbers(QuantizedRows(q, scale, x.dtype)),)

    def norm(impl: Implementation) -> tuple[Tensor, ...]:
        products = Products(impl=impl)
        total, normed = products.norm(linear, x.float(), x.flip(1), weight, eps, one_plus)
        return total, _as_numbers(normed)

    def gated(impl: Implementation) -> tuple[Tensor, ...]:
        products = Products(impl=impl)
        return (_as_numbers(products.gated(linear, gate_up, model.activation)),)

    yield from (("quantize_rows", rows), ("quantized_norm", norm), ("quantized_gated", gated))


def _as_numbers(rows: QuantizedRows) -> Tensor:
    return (rows.q.float() * rows.scale[:, None]).to(rows.dtype)
