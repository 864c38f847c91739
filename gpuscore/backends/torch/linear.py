"""Linear layers: weights in the model's dtype or in eight bits, and their products with rows.

In eight bits, a row is quantised with a scale of its own, so its result does not depend on other
rows in a batch. On a CPU, oneDNN multiplies the integers; `gpuscore_kernels.quantized` defines the
result, and computes it on other devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.quantization import LINEAR, EightBits
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.devices import computes_natively
from gpuscore_kernels import Implementation
from gpuscore_kernels.quantized import fp8, quantize_rows, quantized_product
from gpuscore_kernels.quantized.reference import quantize_rows as plain_quantize_rows

# oneDNN's fast products on CPUs without AMX take unsigned rows. With this zero point, an unsigned
# number means the same as the signed one less it.
ZERO_POINT = 128


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights in the model's dtype."""

    weight: Tensor  # [O, K], perhaps in oneDNN's order, see `pack`
    bias: Tensor | None  # [O]


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Weights in eight bits, as `gpuscore_kernels.quantized` takes them."""

    weight: Tensor  # [O, K], int8 or float8_e4m3fn
    scale: Tensor  # [O], float32
    bias: Tensor | None  # [O], in the model's dtype
    product: fp8.Fp8Product | None = field(init=False)  # by which cards compute it, if in FP8

    def __post_init__(self) -> None:
        made = None
        if self.weight.dtype == torch.float8_e4m3fn:
            made = fp8.Fp8Product(self.weight, self.scale, self.bias)
        object.__setattr__(self, "product", made)


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

    parts: tuple["Linear", ...]


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A rank's columns of a layer; `add` adds up the products of all ranks, in place."""

    part: DenseLinear
    add: Callable[[Tensor], Tensor]


Linear: TypeAlias = DenseLinear | QuantizedLinear | PackedLinear | LinearParts | SummedLinear


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in eight bits, as `gpuscore_kernels.quantized` takes them, or packed weights do."""

    q: Tensor  # [T, K], int8 or float8_e4m3fn; for packed weights uint8 around `ZERO_POINT`
    scale: Tensor  # [T], float32
    dtype: torch.dtype  # of products with them

    def __len__(self) -> int:
        return len(self.scale)


Rows: TypeAlias = Tensor | QuantizedRows


class Products:
    """Computes the products of rows with linear layers.

    Args:
        compiler: makes element-wise functions fast.
        impl: of products in eight bits, where weights are not packed.
    """

    def __init__(
        self,
        compiler: Compiler = eagerly,
        impl: Implementation = "reference",
    ) -> None:
        self._impl: Implementation = impl
        self._quantize = compiler(unsigned)
        self._scaled = compiler(scaled)

    def __call__(self, linear: Linear, x: Rows) -> Tensor:
        """Return the products [T, O] of x [T, K], in x's dtype, with the bias added."""
        if isinstance(x, QuantizedRows):
            if isinstance(linear, PackedLinear):
                return self._packed(linear, x)
            assert isinstance(linear, QuantizedLinear)  # noqa: S101  (see `takes_quantized`)
            return self._quantized(linear, x)
        match linear:
            case DenseLinear():
                return _dense(linear, x)
            case PackedLinear():
                return self._packed(linear, self.unsigned(x))
            case QuantizedLinear():
                q, scale = quantize_rows(x, linear.weight.dtype, impl=self._impl)
                return self._quantized(linear, QuantizedRows(q, scale, x.dtype))
            case LinearParts():
                return torch.cat([self(part, x) for part in linear.parts], dim=1)
            case SummedLinear():
                return linear.add(self(linear.part, x))

    def takes_quantized(self, linear: Linear) -> TypeGuard[QuantizedLinear]:
        """True if rows may be quantised by the kernel that makes them."""
        return self._impl == "triton" and isinstance(linear, QuantizedLinear)

    def norm(
        self,
        linear: QuantizedLinear,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        one_plus: bool,
    ) -> tuple[Tensor, QuantizedRows]:
        """Return x + delta, and its norm as the layer takes it."""
        from gpuscore_kernels.quantized_rows import triton  # only where Triton is

        how = eps, one_plus, linear.weight.dtype
        total, q, scale = triton.quantized_norm(x, delta, weight, *how)
        return total, QuantizedRows(q, scale, weight.dtype)

    def gated(self, linear: QuantizedLinear, gate_up: Tensor, activation: str) -> QuantizedRows:
        """Return act(gate) * up as the layer takes it."""
        from gpuscore_kernels.quantized_rows import triton

        rows = triton.quantized_gated(gate_up, activation, linear.weight.dtype)
        return QuantizedRows(*rows, gate_up.dtype)

    def _quantized(self, linear: QuantizedLinear, x: QuantizedRows) -> Tensor:
        if linear.product is not None and self._impl == "triton":
            return linear.product(x.q, x.scale, x.dtype)
        operands = x.q, x.scale, linear.weight, linear.scale, linear.bias
        return quantized_product(*operands, dtype=x.dtype, impl=self._impl)

    def unsigned(self, x: Tensor) -> QuantizedRows:
        """Return rows as packed weights take them."""
        q, scale = self._quantize(x)
        return QuantizedRows(q, scale, x.dtype)

    def _packed(self, linear: PackedLinear, x: QuantizedRows) -> Tensor:
        if len(x) == 0:  # oneDNN takes no empty tensors
            return x.scale.new_empty(0, len(linear.scale), dtype=x.dtype)
        y = _onednn(x.q, linear)
        if x.dtype == torch.float32:
            return _scaled_in_place(y, x.scale, linear.bias)
        scaled: Tensor = self._scaled(y, x.scale, linear.bias, x.dtype)
        return scaled


def pack(linear: Linear) -> Linear:
    """Return the layer with weights in int8, and in bfloat16 on x86, in oneDNN's order.

    Otherwise every product in bfloat16 would bring its weights into that order first. The sums,
    and so the bits, are the same. Experts of a mixture and the label head keep the plain order:
    single experts, tiles and tokens are read from their tensors.
    """
    match linear:
        case DenseLinear() if linear.weight.dtype == torch.bfloat16 and _reads_reordered():
            return replace(linear, weight=torch.ops.mkldnn._reorder_linear_weight(linear.weight))
        case LinearParts(parts):
            return LinearParts(tuple(map(pack, parts)))
        case QuantizedLinear() if linear.weight.dtype == torch.int8:
            packed = torch.ops.onednn.qlinear_prepack(linear.weight, None)
            zero_points = torch.zeros(len(linear.scale), dtype=torch.int32)
            return PackedLinear(packed, linear.scale, zero_points, linear.bias)
    return linear


def _reads_reordered() -> bool:
    """True on x86 with products in bfloat16; elsewhere the order was not measured."""
    x86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"
    return x86 and computes_natively("bfloat16")


def stack(linears: Sequence[Linear]) -> Linear:
    """Return one layer for several that read the same rows; in parts if their formats differ."""
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
    q[1], q[2] = 0, torch.arange(512) % 256
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
    q, scale = plain_quantize_rows(x, torch.int8)
    return q.view(torch.uint8) ^ ZERO_POINT, scale


def scaled(y: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y times the scales of its rows, plus the bias, rounded once."""
    y = y * scale[:, None]
    return (y if bias is None else y + bias.float()).to(dtype)


def _dense(linear: DenseLinear, x: Tensor) -> Tensor:
    weight, bias = linear.weight, linear.bias
    if weight.is_mkldnn:
        if x.dtype == weight.dtype:
            reordered = torch.ops.mkldnn._linear_pointwise
            product: Tensor = reordered(x, weight, bias, "none", [], "")
            return product
        weight = weight.to_dense()  # the reference of the check at start has rows in float32
    bias = None if bias is None else bias.to(x.dtype)
    return functional.linear(x, weight.to(x.dtype), bias)


def _scaled_in_place(y: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product times scales plus bias in float32, in place, without a second tensor."""
    y *= scale[:, None]
    return y if bias is None else y.add_(bias)


def _onednn(q: Tensor, linear: PackedLinear) -> Tensor:
    """Return q w' [T, O] times the scales of w's rows, in float32; sums are exact integers.

    The operator takes one scale for all of q, so the scales of q's rows are multiplied afterwards.
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
        "none",  # what follows the product
        [],
        "",
    )
    return product


def why_not_in_eight_bits(
    model: DecoderConfig, device: torch.device, dtype: torch.dtype, kernels: bool, kind: EightBits
) -> str | None:
    """Say why linear layers are not computed in a format here; None if they are.

    Args:
        model: its configuration.
        device, dtype: of the model.
        kernels: Triton's kernels run.
        kind: the format.
    """
    if model.mixture is not None and (device.type != "cpu" or kernels):
        return "mixtures of experts are computed in eight bits on CPUs only, with --kernels torch"
    if device.type == "cuda" and not kernels:
        return "products in eight bits on CUDA need --kernels triton"
    if kind == "fp8":
        return _why_not_fp8(model, device, dtype)
    if device.type == "cpu" and not exact_on_this_cpu():
        return "this CPU has neither VNNI nor AMX, without which sums of INT8 overflow"
    return None


def _why_not_fp8(model: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"device {device.type} does not compute FP8"
    capability, shapes = torch.cuda.get_device_capability(device), weight_shapes(model)
    for part in sorted(LINEAR):
        outputs, width = shapes[part]
        reason = fp8.refusal(capability, outputs, width, dtype)
        if reason is not None:
            return reason
    return None
