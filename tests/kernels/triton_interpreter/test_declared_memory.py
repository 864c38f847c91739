"""Promise: a kernel touches the memory that it declares to the checker of streams, and no other.

Every launch runs twice. Between the runs everything that it does not declare to read gets another
content, and what both runs leave as it was has not been written.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from gpuscore.backends.torch.attention.triton import layout_of
from gpuscore_kernels.add_rms_norm import add_rms_norm
from gpuscore_kernels.delta_net import delta_chunks
from gpuscore_kernels.delta_rows import convolve, gated_norm
from gpuscore_kernels.expert_mlp import expert_mlp
from gpuscore_kernels.extend_attention import build_tiles, extend_attention, upload
from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.gated import gated
from gpuscore_kernels.label_head import label_logits, vocab_statistics
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from gpuscore_kernels.quantized import quantize_rows, quantized_product
from gpuscore_kernels.quantized_rows import quantized_gated, quantized_norm
from gpuscore_kernels.routing import route
from kernel_code.check import kernels as folders
from kernel_code.check import variants
from support.attention_inputs import inputs, requests
from support.kernels import DEVICE, INTERPRETED
from support.kernels import randn as random_numbers
from support.slow import slow
from support.streams.kernels import DECLARED, Declared, bound

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="launches are intercepted there")


class Undeclared(AssertionError):
    """A launch read or wrote something else than it declares."""


def check_launch(declared: Declared, arguments: Mapping[str, Any], launch: Any) -> None:
    """Run `launch` on two backgrounds; raise Undeclared unless it keeps to its declaration."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    whole = {t.untyped_storage().data_ptr(): storage_of(t) for t in tensors.values()}
    first = {at: memory.clone() for at, memory in whole.items()}
    launch()
    after = {at: memory.clone() for at, memory in whole.items()}
    may_write = extents(tensors, declared.touched("writes", arguments))
    may_read = extents(tensors, declared.touched("reads", arguments))
    for at, memory in whole.items():
        memory.copy_(first[at])
        other = other_content(memory, tensors, at)
        memory.copy_(torch.where(may_read[at], memory, other))
    second = {at: memory.clone() for at, memory in whole.items()}
    launch()
    for at, memory in whole.items():
        changed = after[at] != first[at]
        if bool((changed & ~may_write[at]).any()):
            raise Undeclared("a write")
        left = (after[at] == first[at]) & (memory == second[at])
        if bool((~left & (after[at] != memory)).any()):
            raise Undeclared("a result that depends on other memory")


def storage_of(x: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())  # type: ignore[call-overload]


def extents(tensors: Mapping[str, Tensor], names: list[str]) -> dict[int, Tensor]:
    """Return a mask over the bytes of every storage: the extents of the arguments `names`."""
    masks = {
        t.untyped_storage().data_ptr(): torch.zeros(t.untyped_storage().nbytes(), dtype=torch.bool)
        for t in tensors.values()
    }
    for name in names:
        x = tensors[name]
        if x.numel():
            reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
            start = x.storage_offset() * x.itemsize
            masks[x.untyped_storage().data_ptr()][start : start + reach * x.itemsize] = True
    return masks


def other_content(memory: Tensor, tensors: Mapping[str, Tensor], at: int) -> Tensor:
    """Return other numbers for a storage: zeros, which are in range for every index, or ones."""
    of = next(t for t in tensors.values() if t.untyped_storage().data_ptr() == at)
    dtype = of.dtype
    numbers = memory.view(dtype)
    if not dtype.is_floating_point:
        return torch.zeros_like(memory)
    return torch.where(numbers == 1, 2, 1).to(dtype).view(torch.uint8)


@pytest.fixture
def launched(monkeypatch):
    """Check every launch; `launched.declared` may be changed."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run
    seen: dict[str, int] = {}
    declared = dict(DECLARED)

    def checked(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = kernel.fn.__name__
        seen[name] = seen.get(name, 0) + 1
        check_launch(
            declared[name],
            bound(kernel, args, options),
            lambda: run(kernel, *args, grid=grid, warmup=warmup, **options),
        )

    monkeypatch.setattr(InterpretedFunction, "run", checked)
    checked.seen, checked.declared = seen, declared  # type: ignore[attr-defined]
    return checked


TIMES = count()


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return other numbers at every call: a result must not be what freed memory holds already."""
    return random_numbers(*shape, seed=seed + 1000 * next(TIMES))


def norms():
    x, delta, weight = randn(3, 24, seed=1), randn(3, 24, seed=2), randn(24)
    add_rms_norm(x, delta, weight, eps=1e-3, impl="triton")
    add_rms_norm(x, None, weight, eps=1e-3, one_plus=True, impl="triton")


def activations():
    gated(randn(3, 40), "silu", impl="triton")


def heads(num_heads=2, num_kv_heads=1, norm=True, pages=True):
    dim, rows = 8, 4
    qkv = randn(rows, (num_heads + 2 * num_kv_heads) * dim)
    k, v = randn(num_kv_heads, 8, dim, seed=3), randn(num_kv_heads, 8, dim, seed=4)
    slots = torch.tensor([3, -1, 5, 2], device=DEVICE)
    qk_norm_rope_store(
        qkv,
        randn(rows, dim // 2, seed=5),
        randn(rows, dim // 2, seed=6),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=randn(dim, seed=7) if norm else None,
        k_norm=randn(dim, seed=8) if norm else None,
        eps=1e-6,  # values that are not kept are not read, and are normed as zeros
        pages=Pages(k, v, slots) if pages else None,
        impl="triton",
    )


def all_heads():
    heads()
    heads(pages=False)
    heads(norm=False)
    heads(num_heads=0)
    heads(num_kv_heads=0, pages=False)


def labels():
    hidden, weight = randn(5, 32), randn(77, 32, seed=1)
    rows, ids = (torch.tensor(x, device=DEVICE) for x in ([4, 1, 2], [7, 70, 3]))
    label_logits(hidden, weight, rows, ids, impl="triton")
    for chosen in (rows, None):
        for num_top in (0, 1, 3):
            vocab_statistics(hidden, weight, chosen, num_top=num_top, impl="triton")


TILES = TileConfig(rows=16, keys=16, own=16, num_warps=1, num_stages=1)


def apart(table):
    """Return the table with each array in memory of its own; usually they share one."""
    (tiles,) = upload([table], torch.device(DEVICE))
    names = ("rows", "tiles", "pool_tiles", "masked")
    return replace(tiles, **{name: getattr(tiles, name).clone() for name in names})


def attention(window=None, need_lse=False):
    batch = requests((20, 3, [2, 5]), (0, 4, [1]), (3, 0, [3]), page_size=16, num_pages=6)
    q, k, v, pool_k, pool_v = inputs(batch, 16, 6, (2, 1), 16, torch.float32, DEVICE).all()
    pool_k, pool_v = pool_k.nan_to_num(0.5), pool_v.nan_to_num(0.5)
    tiles = apart(build_tiles(layout_of(batch, 16), TILES.shape(2), window=window))
    extend_attention(
        q, k, v, pool_k, pool_v, tiles, scale=0.3, need_lse=need_lse, config=TILES, impl="triton"
    )


def attentions():
    attention()
    attention(window=7, need_lse=True)


def mixtures():
    """A mixture with padding, and one whose rows are all there."""
    own = randn(3, 24, 8, seed=1), randn(3, 8, 12, seed=2)
    for filled in (torch.tensor([4], dtype=torch.int32, device=DEVICE), None):
        logits = randn(6, 3, seed=3)
        routing = route(logits, top_k=2, norm_top_k=True, filled=filled, impl="triton")
        expert_mlp(randn(6, 8), routing, *own, "silu", impl="triton")


def eight_bits():
    """Products of quantised rows, with and without a bias."""
    (q, scale), (w, scale_w) = (
        quantize_rows(randn(n, 24, seed=n), torch.int8, impl="triton") for n in (5, 7)
    )
    for bias in (randn(7), None):
        quantized_product(q, scale, w, scale_w, bias, dtype=torch.float32, impl="triton")


def quantised_rows():
    x, delta, weight = randn(3, 24, seed=1), randn(3, 24, seed=2), randn(24)
    for added in (delta, None):
        quantized_norm(x, added, weight, eps=1e-3, dtype=torch.int8, impl="triton")
    quantized_gated(randn(3, 40), "silu", dtype=torch.int8, impl="triton")


def linear_layers():
    """Chunks that begin with states, and without; the rows of a layer."""
    rows = torch.tensor([[3, 1], [0, 4]], device=DEVICE)
    for sources in (torch.tensor([1, 0], device=DEVICE), None):
        by_head = randn(5, 2).sigmoid(), -randn(5, 2, seed=1).abs()
        states, out = randn(2, 1, 4, 6), randn(5, 2, 3)
        tensors = randn(5, 14), *by_head, rows, sources, 1, states, out
        delta_chunks(*tensors, impl="triton")
    places = torch.tensor([[4, 0], [0, 1], [3, 2]], device=DEVICE)
    convolve(randn(3, 14), randn(2, 14), places, randn(2, 14), 4, 4, impl="triton")
    gated_norm(randn(3, 2, 3), randn(3, 6), randn(3), 1e-3, impl="triton")


CALLS = {
    "add_rms_norm_kernel": norms,
    "gated_kernel": activations,
    "qk_norm_rope_store_kernel": all_heads,
    "label_logits_kernel": labels,
    "slice_statistics_kernel": labels,
    "merge_slices_kernel": labels,
    "merge_best_kernel": labels,
    "extend_attention_kernel": attentions,
    "route_kernel": mixtures,
    "place_kernel": mixtures,
    "expert_gate_up_kernel": mixtures,
    "expert_down_kernel": mixtures,
    "combine_experts_kernel": mixtures,
    "quantize_rows_kernel": eight_bits,
    "int8_product_kernel": eight_bits,
    "convolve_kernel": linear_layers,
    "gated_norm_kernel": linear_layers,
    "systems_kernel": linear_layers,
    "delta_chunks_kernel": linear_layers,
    "quantized_norm_kernel": quantised_rows,
    "quantized_gated_kernel": quantised_rows,
}


@pytest.mark.parametrize(
    "call",
    [
        norms,
        activations,
        all_heads,
        eight_bits,
        quantised_rows,
        linear_layers,
        *slow(labels, attentions, mixtures),
    ],
    ids=lambda call: call.__name__,
)
def test_a_kernel_keeps_to_its_declaration(launched, call):
    call()
    assert set(launched.seen) == {name for name, own in CALLS.items() if own is call}


def test_every_kernel_is_declared_and_called():
    kernels = {v.kernel.fn.__name__ for name in folders() for v in variants(name).values()}
    assert kernels == CALLS.keys()
    assert kernels == DECLARED.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "argument"),
    [
        (name, side, argument)
        for name, declared in DECLARED.items()
        for side in ("reads", "writes")
        for argument in getattr(declared, side).split()
    ],
)
def test_no_argument_can_be_left_out(launched, name, side, argument):
    """Each argument is needed: a declaration without it is refuted."""
    own = launched.declared[name]
    others = " ".join(x for x in getattr(own, side).split() if x != argument)
    launched.declared[name] = replace(own, **{side: others})
    with pytest.raises(Undeclared):
        CALLS[name]()
