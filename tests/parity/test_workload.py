"""Promise: a workload follows from its seeds and the model, and has every kind of request."""

import shutil
from pathlib import Path

import pytest

import gpuscore
from gpuscore.commands.cli import main
from gpuscore.errors import ConfigError
from gpuscore.measure.agreement import RANKED
from gpuscore.measure.workload import make_workload, query_numbers, read_tokenizer

DEMO = Path(gpuscore.__file__).parent / "demo"


def test_it_follows_from_the_seed_and_the_model():
    first = make_workload("quick", 0, 400, 512, None)
    others = [("full", 0, 400), ("quick", 1, 400), ("quick", 0, 399)]
    digests = {make_workload(s, n, v, 512, None).digest for s, n, v in others}
    assert len(digests | {first.digest}) == 4
    # A release of NumPy or of this program must not change this digest: bundles are compared by
    # it.
    assert first.digest.startswith("a3bff81c6994c992")


@pytest.mark.parametrize("size", ["quick", "standard", "full"])
def test_it_fits_the_model_and_has_every_mode(size):
    made = make_workload(size, 0, 400, 512, None)
    for case in made.cases:
        prompts = case.prompt_ids()
        assert len(prompts) == len(case.items) == len(case.label_ids)
        assert all(0 < len(ids) <= 512 and max(ids) < 400 for ids in prompts)
    modes = {(c.same_labels, c.apply_softmax, c.item_first) for c in made.cases}
    assert {(True, False, False), (False, False, False), (True, True, False)} <= modes
    assert any(case.item_first for case in made.cases)
    assert max(len(case.items) for case in made.cases) == 500


def test_no_query_has_most_of_the_others_say():
    """There are over twenty queries, each with a ranking, so that intervals by query mean
    something."""
    made = make_workload("quick", 0, 400, 512, None)
    assert len(set(query_numbers(made.cases).values())) >= 24
    ranked = [case for case in made.cases if case.same_labels and len(case.items) >= RANKED]
    assert len({repr(case.query) for case in ranked}) >= 24


class TestText:
    """The workload of real sentences."""

    def test_it_follows_from_the_model_and_has_every_mode(self):
        made = make_workload("text", 0, 1792, 4096, read_tokenizer(DEMO))
        assert made.named == "text"
        assert len(set(query_numbers(made.cases).values())) >= 24
        assert max(len(case.items) for case in made.cases) >= 120
        assert max(len(ids) for case in made.cases for ids in case.prompt_ids()) > 600
        assert {(c.item_first, c.apply_softmax) for c in made.cases} == {
            *((False, False), (True, False), (False, True))
        }

    def test_prompts_are_the_texts(self):
        """The tokenizer makes them from the same query and item that a server gets."""
        tokenizer = read_tokenizer(DEMO)
        assert tokenizer is not None
        for case in make_workload("text", 0, 1792, 4096, tokenizer).cases:
            for item, ids in zip(case.items, case.prompt_ids(), strict=True):
                whole = f"{item}{case.query}" if case.item_first else f"{case.query}{item}"
                assert tokenizer.decode(ids, skip_special_tokens=False) == whole

    @pytest.mark.parametrize(
        ("vocab", "context", "named", "message"),
        [
            (1792, 4096, None, "needs a tokenizer.json; --workload quick, standard, full has"),
            (16, 4096, DEMO, "fewer than two of ' yes', ' no', .* are one token"),
            (1792, 512, DEMO, "its longest request has .* tokens, the model's context is 512"),
        ],
    )
    def test_models_that_cannot_have_it(self, vocab, context, named, message):
        tokenizer = None if named is None else read_tokenizer(named)
        with pytest.raises(ConfigError, match=message):
            make_workload("text", 0, vocab, context, tokenizer)

    def test_it_is_the_default_of_a_model_with_a_tokenizer(self, tmp_path, capsys):
        """The default of a model without a tokenizer is random ids."""
        bare = tmp_path / "bare"
        shutil.copytree(DEMO, bare, ignore=shutil.ignore_patterns("tokenizer*"))
        for model, said in ((DEMO, "--workload text are fixed"), (bare, "must be from 0 to")):
            assert main(["parity", "run", str(model), "--seed", "-1", "--device", "cpu"]) == 78
            assert said in capsys.readouterr().err


def test_a_model_that_is_too_small():
    with pytest.raises(ConfigError, match="is too small"):
        make_workload("quick", 0, 400, 64, None)
