"""Promise: the torch backend with Triton's kernels scores the demo as the golden bundles say."""

import pytest

from gpuscore import Scorer
from gpuscore.measure.runs import score_case
from support.golden import DEMO, golden, judged, scored
from support.kernels import in_triton

# The interpreter takes seconds for each of the others.
NAMES = ("short", "shared sub-prefixes", "query 1", "softmax")


@pytest.mark.slow
def test_scores_are_the_golden_ones(quick_start):
    exact = golden("torch-float32")
    cases = {case.name: case for case in exact.workload.cases}
    with Scorer(in_triton(DEMO)) as scorer:
        results = {name: score_case(scorer, cases[name]) for name in NAMES}
    verdicts = judged(scored(results, exact))
    assert not [verdict for verdict in verdicts if verdict.failed]
    passed = {verdict.gate for verdict in verdicts if verdict.passed}
    assert passed == {"float32", "rank", "label mass"}
