"""Promise: the checker finds every defect of the kind that it is for, planted in the product's
source."""

import pytest

from support.slow import slow
from support.streams.plants import INT8_WITHOUT_GRAPHS, OUT_OF_MEMORY, PLANTS, SEEDS, is_found
from support.streams.worlds import check_group


@pytest.mark.parametrize(
    "index", [0, *slow(*range(1, len(PLANTS)))], ids=lambda index: PLANTS[index].name
)
def test_a_planted_defect_is_found(model, index):
    assert is_found(PLANTS[index], model)


@pytest.mark.slow
def test_without_a_defect_these_worlds_have_no_finding(model):
    assert not check_group(model, SEEDS + OUT_OF_MEMORY, 0).findings
    assert not check_group(model, SEEDS, INT8_WITHOUT_GRAPHS).findings
