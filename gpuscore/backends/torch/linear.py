"""Linear layers: weights in the model's dtype or, on a CPU, in INT8, and their products with rows.

In INT8 a row is quantised with a scale of its own (`gpuscore_kernels.quantized`), so its result
does not depend on other rows in a batch. oneDNN multiplies the integers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.quantization import ON_CPUS
from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.devices import computes_natively
from gpuscore_kernels.quantized import quantize_rows

# oneDNN's fast products on CPUs without AMX take unsigned rows: a signed number plus this zero
# point, which oneDNN subtracts again.
ZERO_POINT = 128
ALONE: tuple[Any, ...] = ("none", [], "")  # nothing follows a product of oneDNN


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights in the model's dtype."""

    weight: Tensor  # [O, K], perhaps in oneDNN's order, see `pack`
    bias: Tensor | None  # [O]


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Weights in INT8 in a checkpoint's order; `pack` brings them into oneDNN's order."""

    weight: Tensor  # [O, K], int8
    scale: Tensor  # [O], float32
    bias: Tensor | None  # [O], in the model's dtype


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights in int8, in the order in which oneDNN reads them."""

    packed: Tensor
    scale: Tensor  # [O], float32
    zero_points: Tensor  # [O], int32: zeros
    bias: Tensor | None  # [O], in the model's dtype


@dataclass(frozen=True, slots=True)
class LinearParts:
    """Layers that read the same rows; their results stand side by side."""

    parts: tuple["LinearWeights", ...]


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A rank's columns of a layer; `add` adds up the products of all ranks, in place."""

    part: DenseLinear
    add: Callable[[Tensor], Tensor]


LinearWeights: TypeAlias = DenseLinear | QuantizedLinear | PackedLinear | LinearParts | SummedLinear


class Products:
    """Computes the products of rows with linear layers.

    Args:
        compiler: makes element-wise functions fast.
    """

    def __init__(self, compiler: Compiler = eagerly) -> None:
        self._quantize = compiler(unsigned)
        self._scaled = compiler(scaled)

    def __call__(self, linear: LinearWeights, x: Tensor) -> Tensor:
        """Return the products [T, O] of x [T, K], in x's dtype, with the bias added."""
        match linear:
            case DenseLinear():
                return _dense(linear, x)
            case PackedLinear():
                return self._packed(linear, x)
            case QuantizedLinear():
                return self(pack(linear), x)
            case LinearParts():
                return torch.cat([self(part, x) for part in linear.parts], dim=1)
            case SummedLinear():
                return linear.add(self(linear.part, x))

    def _packed(self, linear: PackedLinear, x: Tensor) -> Tensor:
        if len(x) == 0:  # oneDNN takes no empty tensors
            return x.new_empty(0, len(linear.scale))
        q, scale = self._quantize(x)
        y = _onednn(q, linear)
        if x.dtype == torch.float32:
            y *= scale[:, None]  # in place, without a second tensor
            return y if linear.bias is None else y.add_(linear.bias)
        product: Tensor = self._scaled(y, scale, linear.bias, x.dtype)
        return product


class Linear:
    """A linear layer of the decoder."""

    def __init__(self, weights: LinearWeights, products: Products) -> None:
        self.weights = weights
        self._products = products

    def __call__(self, x: Tensor) -> Tensor:
        """Return the products [T, O] of x [T, K], in x's dtype, with the bias added."""
        return self._products(self.weights, x)


def pack(linear: LinearWeights) -> LinearWeights:
    """Bring weights in int8, and in bfloat16 on x86, into oneDNN's order.

    Otherwise every product in bfloat16 would reorder its weights first. The sums, and so the bits,
    are the same. Experts of a mixture and the label head keep the plain order, because single
    experts, tiles and tokens are read from their tensors.
    """
    match linear:
        case DenseLinear() if linear.weight.dtype == torch.bfloat16 and _reads_reordered():
            return replace(linear, weight=torch.ops.mkldnn._reorder_linear_weight(linear.weight))
        case LinearParts(parts):
            return LinearParts(tuple(map(pack, parts)))
        case QuantizedLinear():
            packed = torch.ops.onednn.qlinear_prepack(linear.weight, None)
            zero_points = torch.zeros(len(linear.scale), dtype=torch.int32)
            return PackedLinear(packed, linear.scale, zero_points, linear.bias)
    return linear


def _reads_reordered() -> bool:
    """True on x86 with products in bfloat16; elsewhere the order was not measured."""
    x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    return x86 and computes_natively("bfloat16")


def stack(linears: Sequence[LinearWeights]) -> LinearWeights:
    """Join layers that read the same rows into one; it has parts if their formats differ."""
    if len(linears) == 1:
        return linears[0]
    dense = [linear for linear in linears if isinstance(linear, DenseLinear)]
    if len(dense) == len(linears):
        return DenseLinear(torch.cat([linear.weight for linear in dense]), _biases(dense))
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if len(quantized) == len(linears):
        weight, scale = (
            [getattr(linear, name) for linear in quantized] for name in ("weight", "scale")
        )
        return QuantizedLinear(torch.cat(weight), torch.cat(scale), _biases(quantized))
    return LinearParts(tuple(linears))


def exact_on_this_cpu() -> bool:
    """True if oneDNN's sums of products of int8 are exact on this CPU.

    Without VNNI or AMX it adds pairs of products in 16 bits, which overflow.
    """
    w = torch.full((2, 512), 127, dtype=torch.int8)
    w[1] = -128
    q = torch.full((3, 512), 255, dtype=torch.uint8)
    q[1] = 0
    q[2] = torch.arange(512) % 256
    layer = pack(QuantizedLinear(w, torch.ones(2), None))
    assert isinstance(layer, PackedLinear)  # noqa: S101
    try:
        y = _onednn(q, layer)
    except RuntimeError:  # no such operator for this kind of CPU
        return False
    return torch.equal(y.double(), (q.double() - ZERO_POINT) @ w.double().T)


def _biases(linears: Sequence[DenseLinear] | Sequence[QuantizedLinear]) -> Tensor | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None


def unsigned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows quantised to int8, as unsigned numbers around `ZERO_POINT`, and their scales."""
    q, scale = quantize_rows(x)
    return q.view(torch.uint8) ^ ZERO_POINT, scale


def scaled(y: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y times the scales of its rows, plus the bias, rounded once."""
    y = y * scale[:, None]
    return (y if bias is None else y + bias.float()).to(dtype)


def _dense(linear: DenseLinear, x: Tensor) -> Tensor:
    weight = linear.weight
    bias = linear.bias
    if weight.is_mkldnn:
        if x.dtype == weight.dtype:
            reordered = torch.ops.mkldnn._linear_pointwise
            product: Tensor = reordered(x, weight, bias, *ALONE)
            return product
        weight = weight.to_dense()  # in the start check, the reference's rows are float32
    bias = None if bias is None else bias.to(x.dtype)
    return functional.linear(x, weight.to(x.dtype), bias)


def _onednn(q: Tensor, linear: PackedLinear) -> Tensor:
    """Return q w' [T, O] times the scales of w's rows, in float32; sums are exact integers.

    The operator takes one scale for all of q, so the caller multiplies by the scales of q's rows.
    """
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        q,
        1.0,
        ZERO_POINT,
        linear.packed,
        linear.scale,
        linear.zero_points,
        None,  # bias
        1.0,  # scale and zero point of a quantised result
        0,
        torch.float32,
        *ALONE,
    )
    return product


def why_not_int8(device: torch.device) -> str | None:
    """Say why linear layers are not computed in INT8 here; None if they are."""
    if device.type != "cpu":
        return ON_CPUS
    if not exact_on_this_cpu():
        return "this CPU has neither VNNI nor AMX; without them, sums of INT8 overflow"
    return None
