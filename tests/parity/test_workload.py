"""Promise: a workload follows from its seeds and the model, and has every kind of request."""

from pathlib import Path

import pytest

import gpuscore
from gpuscore import Scorer
from gpuscore.errors import ConfigError
from gpuscore.measure.parity.gates import MANY, SPREAD
from gpuscore.measure.parity.measures import RANKED
from gpuscore.measure.parity.metrics import log_odds
from gpuscore.measure.parity.runs import score_case
from gpuscore.measure.parity.workload import Workload, make_workload, query_numbers, read_tokenizer


def test_it_follows_from_seed_and_model(tiny_model):
    tokenizer = read_tokenizer(tiny_model("llama")[0])
    first = make_workload("quick", 0, 400, 512, tokenizer)
    assert first.digest == make_workload("quick", 0, 400, 512, tokenizer).digest
    others = [("full", 0, 400, 1), ("quick", 1, 400, 1), ("quick", 0, 399, 1)]
    others.append(("quick", 0, 400, 2))
    digests = {make_workload(s, n, v, 512, tokenizer, k).digest for s, n, v, k in others}
    assert len(digests | {first.digest}) == 5
    assert Workload.from_json(first.as_json()) == first
    # A release of NumPy or of this program must not change this digest: bundles are compared by
    # it.
    ids = make_workload("quick", 0, 400, 512, None)
    assert ids.digest.startswith("662ecef30828fa1a")


@pytest.mark.parametrize("size", ["quick", "standard", "full"])
def test_it_fits_the_model_and_has_every_mode(tiny_model, size):
    tokenizer = read_tokenizer(tiny_model("llama")[0])
    made = make_workload(size, 0, 400, 512, tokenizer)
    assert not made.left_out
    for case in made.cases:
        prompts = case.prompt_ids()
        assert len(prompts) == len(case.items) == len(case.label_ids)
        assert all(0 < len(ids) <= 512 and max(ids) < 400 for ids in prompts)
    modes = {(c.labels is None, c.apply_softmax, c.item_first) for c in made.cases}
    assert {(True, False, False), (False, False, False), (False, True, True)} <= modes
    assert max(len(case.items) for case in made.cases) == 500


def test_no_query_has_most_of_the_others_say():
    """Over twenty queries, each with a ranking, so that intervals by query mean something."""
    made = make_workload("quick", 0, 400, 512, None)
    assert len(set(query_numbers(made).values())) >= 24
    ranked = [case for case in made.cases if case.same_labels and len(case.items) >= RANKED]
    assert len({repr(case.query) for case in ranked}) >= 24


def test_every_seed_adds_queries_of_its_own():
    one, three = (make_workload("quick", 5, 400, 512, None, seeds) for seeds in (1, 3))
    assert three.cases[: len(one.cases)] == one.cases
    second = make_workload("quick", 6, 400, 512, None).cases
    assert [case.query for case in three.cases[len(one.cases) :]][: len(second)] == [
        case.query for case in second
    ]
    names = [case.name for case in three.cases]
    assert len(set(names)) == len(names) == 3 * len(one.cases)
    assert "query 1, seed 7" in names
    queries = [len(set(query_numbers(made).values())) for made in (one, three)]
    assert queries[1] == 3 * queries[0]
    assert Workload.from_json(three.as_json()) == three


def test_its_graded_items_are_spread_in_the_demo():
    """So the gate on the order of long lists has something to judge."""
    directory = Path(gpuscore.__file__).parent / "demo"
    made = make_workload("quick", 0, 1792, 4096, read_tokenizer(directory))
    case = next(case for case in made.cases if case.name == "text, graded items")
    with Scorer(str(directory), dtype="float32") as scorer:
        found = score_case(scorer, case).values
    assert len(found) >= MANY
    assert log_odds(found).std(axis=0).min() >= SPREAD


def test_a_workload_lists_the_cases_that_it_leaves_out(capsys):
    assert make_workload("quick", 0, 400, 512, None).left_out == ("text: no tokenizer.json",)


def test_a_model_that_is_too_small():
    with pytest.raises(ConfigError, match="is too small"):
        make_workload("quick", 0, 400, 64, None)
