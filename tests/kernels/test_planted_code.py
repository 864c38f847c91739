"""Promise: what makes a loop with a product wait, or its copies narrow, fails the gate on the
generated code."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuscore_kernels.variant import Variant
from kernel_code.compiled import facts_of
from kernel_code.rules import complaints, row
from support.kernels import planted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux"
    ),
]

CACHE = Path(__file__).parents[2] / ".cache" / "kernels"  # as in make check-kernels
ATTENTION, LABEL_HEAD = "extend_attention", "label_head"
EXPERTS, QUANTIZED = "expert_mlp", "quantized"
POOL, PACKED = "tl.range(pool_begin, pool_end)", "tl.range(0, num_packed)"
CARRIED = "bf16 dim=128 group=2 64x64 stages=3 carry"
GATE_UP = "gate Qwen3-30B-A3B torch.bfloat16"
INT8 = "product 128x128 stages=3 bias=False"
HEADS, QWEN3 = "qk_norm_rope_store", "heads=16/8x128 norm=True one_plus=False"
DELTA, STATES = "delta_net", "with states rows=64"
HEAD = "slices width=1024 torch.bfloat16 cap=False top=False"


def variant_of(kernel: str, name: str) -> Variant:
    module = importlib.import_module(f"gpuscore_kernels.{kernel}.triton")  # takes seconds
    (variant,) = [variant for variant in module.variants() if variant.name == name]
    return variant


def refused(variant: Variant, arch: int) -> list[str]:
    """Return the complaints about the structure alone: the baseline is the code's own."""
    facts = facts_of(variant, arch, CACHE)
    return complaints(variant, facts, row(facts))


def with_stages(stages: int) -> Callable[[Variant], Variant]:
    return lambda variant: replace(variant, num_stages=stages)


def with_warps(warps: int) -> Callable[[Variant], Variant]:
    return lambda variant: replace(variant, num_warps=warps)


def unaligned(pointer: str) -> Callable[[Variant], Variant]:
    def change(variant: Variant) -> Variant:
        assert pointer in variant.divisible
        left = tuple(name for name in variant.divisible if name != pointer)
        return replace(variant, divisible=left)

    return change


@pytest.mark.parametrize(
    ("kernel", "name", "arch", "change", "messages"),
    [
        (ATTENTION, CARRIED, 90, with_stages(2), [f"{POOL}: 0 groups", f"{PACKED}: 0 groups"]),
        (ATTENTION, CARRIED, 90, with_stages(1), [f"{POOL}: no copies", f"{PACKED}: no copies"]),
        (ATTENTION, CARRIED, 90, unaligned("pool_k"), [f"{POOL}: 1 tiles are loaded into"]),
        (ATTENTION, CARRIED, 90, unaligned("v"), [f"{PACKED}: 1 tiles are loaded into"]),
        (ATTENTION, CARRIED, 90, unaligned("stride_kt"), [f"{PACKED}: 1 tiles are loaded into"]),
        (LABEL_HEAD, HEAD, 80, with_stages(2), ["BLOCK_K): 0 groups of copies"]),
        (LABEL_HEAD, f"{HEAD} few", 90, with_stages(4), ["BLOCK_K): 4 groups of copies"]),
        (LABEL_HEAD, HEAD, 80, unaligned("weight"), ["BLOCK_K): 1 tiles are loaded into"]),
        (EXPERTS, GATE_UP, 90, with_stages(2), ["BLOCK_K): 0 groups of copies"]),
        (EXPERTS, GATE_UP, 90, unaligned("x_stride"), ["BLOCK_K): 1 tiles are loaded into"]),
        (QUANTIZED, INT8, 90, with_stages(2), ["BLOCK_K): 0 groups of copies"]),
        (QUANTIZED, INT8, 90, unaligned("w"), ["BLOCK_K): 1 tiles are loaded into"]),
        (DELTA, STATES, 90, with_stages(2), ["for start in range(0, key_size, BLOCK_K): 0 groups"]),
        (DELTA, STATES, 90, unaligned("convolved"), ["BLOCK_K): copies of 4 bytes"]),
        (DELTA, STATES, 90, with_warps(16), ["BLOCK_K): copies of 8 bytes"]),
        (HEADS, QWEN3, 90, with_warps(4), ["15 accesses of under 16 bytes, allowed: 7"]),
        (HEADS, QWEN3, 90, unaligned("k_pages"), ["accesses of under 16 bytes, allowed: 7"]),
    ],
)
def test_a_worse_launch_is_refused(kernel, name, arch, change, messages):
    variant = variant_of(kernel, name)
    assert refused(variant, arch) == []
    refusals = refused(change(variant), arch)
    for message in messages:
        assert any(message in complaint for complaint in refusals), refusals


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        # Triton copies the slot too, and waits for all copies before it reads it.
        (3, f"{POOL}: 0 groups of copies in flight"),
        (2, f"{POOL}: copies wait for 1 loads of their own iteration"),
    ],
)
def test_a_slot_that_is_loaded_where_it_is_used_is_refused(stages, message, tmp_path, monkeypatch):
    change = ("slot = next_slot.to(tl.int64)", "slot = tl.load(pool_tiles + index).to(tl.int64)")
    kernel = importlib.import_module("gpuscore_kernels.extend_attention.triton")
    with planted(monkeypatch, kernel, *change, tmp_path):
        refusals = refused(replace(variant_of(ATTENTION, CARRIED), num_stages=stages), 90)
    assert any(message in complaint for complaint in refusals), refusals
    assert stages == 2 or not any(PACKED in complaint for complaint in refusals)


def test_more_keys_than_registers_are_refused():
    variant = variant_of(ATTENTION, CARRIED)
    wide = replace(variant, constexprs=dict(variant.constexprs) | {"BN": 128}, num_stages=2)
    refusals = refused(wide, 90)
    assert any("bytes of stack, allowed: 0" in complaint for complaint in refusals), refusals
