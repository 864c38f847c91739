"""Promise: `make bench-cpu` compares each scorer with a floor of its own precision, measured in the
same run, and counts what a mixture of experts computes."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from ceiling import linear_sizes, operations, rates
from cpu_times import Timed, measure
from random_models import SHAPES
from scenarios import Workload
from spent import Spent
from torch.utils._python_dispatch import TorchDispatchMode

WORK = Workload(30, 4, 5)


def test_every_precision_has_a_floor_of_its_own():
    scorers = {
        "ours": Timed(lambda requests: Spent(2e-4, 3e-4)),
        "ours in int8": Timed(lambda requests: Spent(1e-4, 1.5e-4), precision="int8"),
    }
    measured = measure(scorers, SHAPES["tiny"], torch.float32, WORK, repeat=1)
    rows = {row["scorer"]: row for row in measured["rows"]}
    assert list(rows) == ["floor of this machine", "floor of this machine, int8", *scorers]
    for name, precision, seconds in (("ours", "full", 2e-4), ("ours in int8", "int8", 1e-4)):
        (floor,) = measured["floors"][precision]
        assert floor["linear TFLOP/s"] > 0
        assert rows[name]["of the floor"] == pytest.approx(floor["seconds"] / seconds, rel=0.02)
    assert measured["of the floor"] == rows["ours"]["of the floor"]
    assert rows["ours in int8"]["CPU / gpuscore's"] == 0.5


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.names.add(operator.name())
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("precision", ["full", "int8"])
def test_the_floor_of_int8_multiplies_in_int8(precision):
    with Operators() as operators:
        rates(SHAPES["tiny"], torch.float32, 30, precision)
    assert ("onednn::qlinear_pointwise" in operators.names) == (precision == "int8")


def test_a_mixture_counts_the_experts_that_a_row_chooses():
    mixture = SHAPES["small-moe"]
    inner = mixture["num_experts_per_tok"] * mixture["moe_intermediate_size"]
    dense = SHAPES["small"] | {"intermediate_size": inner}
    assert linear_sizes(mixture) == linear_sizes(dense)
    counted = [operations(shape, 30, 4, 5)["linear"] for shape in (mixture, dense)]
    layers, tokens = mixture["num_hidden_layers"], 30 + 4 * 5
    router = 2 * mixture["hidden_size"] * mixture["num_experts"]
    assert counted[0] - counted[1] == router * ((layers - 1) * tokens + 4)
