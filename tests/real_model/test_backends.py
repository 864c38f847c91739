"""Promise: every way to compute the real model's scores for the workload of real sentences gives
transformers' scores: packed, in chunks, item first, in trees, to the same bits, and with JAX."""

from dataclasses import replace

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.measure.gates import judge, packing
from gpuscore.measure.oracle import Oracle
from gpuscore.measure.runs import run_workload, score_case
from reference import CLOSE, MODEL, PASSAGES
from support.golden import scored

CONFIG = ModelConfig(str(MODEL), device="cpu", dtype="float32", threads=1)
SOME = ("question 1", "question 7", "page", "item_first", "softmax")


def score_some(names, bundle, **changes):
    """Return our scores of some cases."""
    cases = tuple(case for case in bundle.workload.cases if case.name in names)
    assert len(cases) == len(names)
    with Scorer(replace(CONFIG, **changes)) as scorer:
        results = {case.name: score_case(scorer, case) for case in cases}
    return scored(results, bundle, str(changes))


def failed(verdicts):
    return [verdict for verdict in verdicts if verdict.failed]


@pytest.fixture(scope="module")
def torch_run(bundle):
    return run_workload(CONFIG, plan_backend(MODEL, CONFIG), bundle.workload)


def test_the_whole_workload(bundle, torch_run):
    verdicts = [packing(torch_run), *judge(bundle, torch_run)[1]]
    assert not failed(verdicts)
    assert {verdict.gate for verdict in verdicts if verdict.passed} >= {
        "float32",
        "rank",
        "packing",
    }


def test_the_bundle_is_what_transformers_computes_now(bundle):
    oracle = Oracle(MODEL, "float32", "cpu")
    for case in bundle.workload.cases:
        if case.name in ("question 3", "item_first"):
            result, expected = oracle.score(case), bundle.results[case.name]
            np.testing.assert_allclose(result.values, expected.values, atol=CLOSE / 2, rtol=0)


def test_in_chunks(bundle):
    """The page of 800 tokens is read in 13 batches."""
    assert not failed(judge(bundle, score_some(SOME, bundle, max_batch_tokens=64))[1])


def test_the_same_bits(bundle):
    (case,) = (case for case in bundle.workload.cases if case.name == "question 2")
    with Scorer(replace(CONFIG, deterministic=True)) as scorer:
        together = score_case(scorer, case)
        for row in (0, 4, 9):
            single = replace(case, items=[case.items[row]], label_ids=[case.label_ids[row]])
            assert score_case(scorer, single).values.tolist() == [together.values[row].tolist()]
    expected = bundle.results[case.name]
    np.testing.assert_allclose(together.values, expected.values, atol=CLOSE, rtol=0)


def test_trees(reference):
    """Items with common beginnings, which are computed once."""
    heads = [" ".join(PASSAGES[n : n + 3]) for n in (20, 40)]
    ends = [" This is", " In short:", " It follows that", " Nobody", " The model", " Because"]
    items = [f"{head}{end}" for head in heads for end in ends]
    query, labels = "A page of a manual. ", [" not", " the", " it"]
    with Scorer(CONFIG) as scorer:
        got = scorer.score(query, items, labels=labels, logprobs=True).logprobs
    expected = [reference.labels(reference.ids(query + item), labels) for item in items]
    np.testing.assert_allclose(got, expected, atol=CLOSE, rtol=0)


def test_jax(bundle, torch_run):
    run = score_some((*SOME, "question 12"), bundle, backend="jax", threads=None)
    assert not failed(judge(bundle, run)[1])
    assert not failed(judge(torch_run, run)[1])
