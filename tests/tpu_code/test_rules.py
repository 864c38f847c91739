"""Promise: a program that takes more memory than planned, copies or pads its pages, or has become
worse than its baseline is refused."""

from dataclasses import replace

import msgspec
import pytest

from tpu_code.chips import V5E, V6E
from tpu_code.facts import Argument, CompiledKernel, Facts
from tpu_code.kernel_memory import KernelMemory
from tpu_code.rules import Planned, complaints, row

GIB = 2**30
KERNEL = CompiledKernel(KernelMemory("attend", 400_000, 2**24, True), 2**25)
FACTS = Facts(
    arguments=(
        Argument("weights.embed", GIB, GIB, False),
        Argument("weights.lm_head", GIB, GIB, False),
        Argument("pool.pages", 8 * GIB, 8 * GIB, True),
        Argument("buffer", 4096, 4096, False),
    ),
    argument_bytes=10 * GIB + 4096,
    temporary=2**28,
    results=2**20,
    aliased=8 * GIB,
    layer={"fusion": 10, "while": 2, "scatter": 0},
    outside={"fusion": 5, "while": 2, "scatter": 0},
    copies=(),
    kernels=(KERNEL,),
    cycles=6000,
)
PLANNED = Planned(weights=GIB, pages=8 * GIB, batch=2**29, tied=True)


def wrong(facts, planned=PLANNED, chip=V6E, known=None):
    return complaints(facts, planned, chip, known or row(FACTS), extends=True)


def argument(name, **changes):
    return tuple(
        replace(argument, **changes) if argument.name == name else argument
        for argument in FACTS.arguments
    )


def kernel(**changes):
    return (replace(KERNEL, declared=replace(KERNEL.declared, **changes)),)


def test_a_program_like_its_baseline_passes_and_survives_json():
    assert wrong(FACTS) == []
    assert msgspec.json.decode(msgspec.json.encode(FACTS), type=Facts) == FACTS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temporary": GIB}, "the plan leaves"),
        ({"temporary": 2**29 - 2**21}, "bytes, 269484032 before"),
        ({"arguments": argument("pool.pages", padded=16 * GIB)}, "100 % more than the plan"),
        ({"arguments": argument("weights.embed", padded=2 * GIB)}, "weights take"),
        ({"arguments": argument("pool.pages", aliased=False)}, "not updated in place"),
        ({"aliased": 4 * GIB}, "outputs take"),
        ({"argument_bytes": 11 * GIB}, "XLA says"),
        ({"copies": ("copy makes bf16[4,64]",)}, "a copy of the pages"),
        ({"layer": FACTS.layer | {"scatter": 1}}, "row by row"),
        ({"layer": FACTS.layer | {"fusion": 11}}, "layer: 11 of fusion, 10 before"),
        ({"outside": FACTS.outside | {"while": 3}}, "outside: 3 of while, 2 before"),
        ({"kernels": kernel(scalar=2**21)}, "bytes of SMEM, v6e has"),
        ({"kernels": kernel(scalar=500_000)}, "500000 bytes of SMEM, 400000 before"),
        ({"kernels": kernel(vector=2**28)}, "bytes of VMEM, v6e has"),
        ({"kernels": kernel(estimated=False)}, "no cost_estimate"),
        ({"kernels": (replace(KERNEL, taken=2**26),)}, "bytes of VMEM, 33554432 before"),
        ({"kernels": ()}, "0 kernels, 1 before"),
        ({"cycles": 9000}, "cycles of all code"),
    ],
)
def test_what_is_worse_is_refused(changes, said):
    refusals = wrong(replace(FACTS, **changes))
    assert any(said in complaint for complaint in refusals), refusals


def test_a_program_that_does_not_fit_the_chip_is_refused():
    planned = replace(PLANNED, pages=15 * GIB)
    assert not any("v6e has" in complaint for complaint in wrong(FACTS, planned))
    assert any("v5e has" in complaint for complaint in wrong(FACTS, planned, V5E))


def test_a_program_without_a_baseline_is_refused():
    refusals = complaints(FACTS, PLANNED, V6E, None, extends=True)
    assert refusals == ["no baseline; write it with --update"]
