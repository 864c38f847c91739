"""A workload's results as gpuscore computes them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpuscore.backends import Plan
from gpuscore.config import ModelConfig
from gpuscore.measure.results import CaseResult, Measured, errors
from gpuscore.measure.workload import Case, Workload
from gpuscore.models.hub import model_name
from gpuscore.offline.results import Scores
from gpuscore.offline.scorer import Scorer

LONG = ("500 items", "long list")  # names of the longest list; else it is the case with most items
ALONE = 8  # approximate number of the longest list's items that are scored once more, each alone


def run_workload(config: ModelConfig, plan: Plan, workload: Workload) -> Measured:
    """Score every case once, in order; then score items of the longest list alone.

    Args:
        plan: made from `config`; it decides what "auto" means on this machine.

    Raises:
        ConfigError: the model cannot be served.
        GpuscoreError: a case cannot be scored.
    """
    kind = plan.dtype_name if plan.precision == "full" else plan.precision
    name = f"{config.backend}:{kind}:{config.attention}".removesuffix(":auto")
    long = min(workload.cases, key=lambda case: (case.name not in LONG, -len(case.items)))
    with Scorer(config) as scorer:
        scorer.warmup()  # as a server does, so that the same code, such as CUDA graphs, runs
        results = {case.name: score_case(scorer, case) for case in workload.cases}
        alone = _difference_alone(scorer, long, results[long.name])
    return Measured(
        *(name, model_name(config.model), plan.dtype_name),
        facts={"device": plan.device_name},
        workload=workload,
        results=results,
        alone=alone,
        deterministic=config.deterministic,
        precision=plan.precision,
    )


def score_case(scorer: Scorer, case: Case) -> CaseResult:
    """Score a case; with softmax no log-probabilities are asked for, as over HTTP."""
    items: Sequence[Any] = case.items
    scores: Scores = scorer.score(
        case.query,
        items,
        labels=case.labels,
        label_token_ids=None if case.labels is not None else case.label_ids,
        apply_softmax=case.apply_softmax,
        temperature=case.temperature,
        item_first=case.item_first,
        logprobs=not case.apply_softmax,
    )
    if scores.logprobs is None:
        return CaseResult(np.log(scores.scores))
    if not np.allclose(scores.scores, np.exp(scores.logprobs), rtol=1e-6, equal_nan=True):
        raise ValueError(f"{case.name}: scores and log-probabilities contradict each other")
    return CaseResult(scores.logprobs, scores.label_mass)


def _difference_alone(scorer: Scorer, case: Case, together: CaseResult) -> float:
    """Score some items alone; return the largest difference from their scores among all."""
    step = max(1, len(case.items) // ALONE)
    rows = range(0, len(case.items), step)
    items: Sequence[Any] = case.items
    single = (replace(case, items=[items[row]], label_ids=[case.label_ids[row]]) for row in rows)
    scored = [score_case(scorer, one).values[0] for one in single]
    return errors(np.stack(scored) - together.values[list(rows)]).maximum
