"""Promise: a program that takes more memory than planned, copies or pads its pages, or has become
worse than its baseline is refused."""

import json
from dataclasses import replace

import pytest

from tpu_code.chips import V5E, V6E
from tpu_code.facts import Argument, CompiledKernel, Facts
from tpu_code.hlo import Where
from tpu_code.kernel_calls import KernelMemory
from tpu_code.predict import NoTrips, kernel_times, predict, trips
from tpu_code.report import goal_lines
from tpu_code.rules import Planned, complaints, row
from tpu_code.tally import Kernel, Product, Tally
from tpu_code.work import Place

GIB = 2**30
LAYER = Where((("layer", 7), ("forward", 40), ("run", 3)))
INNER = Where((("tile", 9), *LAYER.frames))
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
    work=(
        Place(Where(), None, None, 1000, 1e-6, 0.0, 1e-6, (("copy", 900),)),
        Place(LAYER, None, 28, 2000, 2e-6, 1e-6, 1e-6, ()),
        Place(INNER, None, None, 3000, 3e-6, 1e-6, 1e-6, (("fusion", 2900),)),
    ),
)
PLANNED = Planned(weights=GIB, pages=8 * GIB, batch=2**29, tied=True)


def wrong(facts, planned=PLANNED, chip=V6E, known=None):
    return complaints(facts, planned, chip, known or row(FACTS), extends=True)


def argument(name, **changes):
    return tuple(replace(one, **changes) if one.name == name else one for one in FACTS.arguments)


def kernel(**changes):
    return (replace(KERNEL, declared=replace(KERNEL.declared, **changes)),)


def test_a_program_like_its_baseline_passes_and_survives_json():
    assert wrong(FACTS) == []
    assert Facts.from_json(json.loads(json.dumps(FACTS.to_json()))) == FACTS


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
        ({"work": (replace(FACTS.work[0], cycles=9000), *FACTS.work[1:])}, "cycles of all code"),
    ],
)
def test_what_is_worse_is_refused(changes, said):
    found = wrong(replace(FACTS, **changes))
    assert any(said in one for one in found), found


def test_a_program_that_does_not_fit_the_chip_is_refused():
    planned = replace(PLANNED, pages=15 * GIB)
    assert not any("v6e has" in one for one in wrong(FACTS, planned))
    assert any("v5e has" in one for one in wrong(FACTS, planned, V5E))


def test_a_program_without_a_baseline_is_refused():
    found = complaints(FACTS, PLANNED, V6E, None, extends=True)
    assert found == ["no baseline; write it with --update"]


def test_times_follow_the_trips():
    tally = Tally()
    tally.loops.update({LAYER: 28, INNER: 560})
    found = predict(FACTS.work, tally, V6E)
    assert found.estimate == pytest.approx((1000 + 28 * 2000 + 560 * 3000) / V6E.clock)
    assert found.floor == pytest.approx(1e-6 + 28 * 2e-6 + 560 * 3e-6)
    assert found.products == pytest.approx(28 * 1e-6 + 560 * 1e-6)


def test_a_loop_that_was_not_reached_takes_no_time_and_an_unknown_one_is_refused():
    tally = Tally()
    tally.loops[LAYER] = 0
    assert trips(FACTS.work[2], tally) == 0
    tally.loops[LAYER] = 28
    with pytest.raises(NoTrips, match="tile < layer < forward"):
        trips(FACTS.work[2], tally)


def test_a_kernel_takes_what_its_units_take():
    """A head of 128 fills half of a matrix unit of 256 rows, in each of its two products."""
    one = Kernel(1, 64, lanes=10**9, transcendental=10**8, copied=10**9)
    one.products[Product(512, 128, 256, "bfloat16")] = 1000
    v5e, v6e = (kernel_times(one, chip) for chip in (V5E, V6E))
    operations = 2 * 512 * 128 * 256 * 1000
    assert v5e["products"] == pytest.approx(operations / V5E.bf16)
    assert v6e["products"] == pytest.approx(2 * operations / V6E.bf16)
    assert v6e["copies"] == pytest.approx(1e9 / V6E.bandwidth)
    assert v6e["vectors"] == pytest.approx(1e9 / V6E.lane_operations)


def test_what_stands_in_the_way_is_named():
    tally = Tally()
    tally.loops.update({LAYER: 28, INNER: 560_000})
    said = list(goal_lines(predict(FACTS.work, tally, V6E)))
    assert "NOT reached" in said[0]
    assert "tile < layer < forward" in said[1]
    tally.loops[INNER] = 560
    assert "reached by this prediction" in next(goal_lines(predict(FACTS.work, tally, V6E)))
