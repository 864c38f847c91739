"""A workload's results as gpuscore computes them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpuscore.config import ModelConfig
from gpuscore.config.options import options
from gpuscore.errors import ConfigError
from gpuscore.measure.results import CaseResult, Measured, errors
from gpuscore.measure.workload import Case, Workload
from gpuscore.models.hub import model_name
from gpuscore.offline.scorer import Scorer
from gpuscore.types.results import Scores

_CHOICES = {item.name: item.choices for item in options(ModelConfig)}
DTYPES = ("float32", "bfloat16", "float16")
CONVERTED = "w8a16"  # weights of a quantised checkpoint, in the place of a dtype
LONG = ("500 items", "long list")  # the longest list; else the case with most items
ALONE = 8  # approximate number of the longest list's items that are scored once more, each alone


def configured(text: str, base: ModelConfig) -> ModelConfig:
    """Return `base` with a backend as `framework:dtype[:attention][@device]`.

    `CONVERTED` may stand in the dtype's place; the dtype is then "auto".

    Raises:
        ConfigError: the text has another form.
    """
    named, at, device = text.partition("@")
    parts = named.split(":")
    if len(parts) not in (2, 3):
        raise ConfigError(f"--backends: {text!r} is not framework:dtype[:attention][@device]")
    wanted: dict[str, Any] = dict(zip(("backend", "dtype", "attention"), parts, strict=False))
    wanted |= {"device": device} if at else {}
    for name, value in wanted.items():
        choices = (*DTYPES, CONVERTED) if name == "dtype" else _CHOICES[name]
        if value not in choices:
            raise ConfigError(
                f"--backends: {text!r} asks for {name} {value!r}; there are {', '.join(choices)}"
            )
    if wanted["dtype"] == CONVERTED:
        wanted |= {"dtype": "auto", "quantization": CONVERTED}
    return replace(base, **{"attention": "auto", "quantization": "auto", **wanted})


def run_workload(
    name: str, config: ModelConfig, workload: Workload, precision: str = "full"
) -> Measured:
    """Score every case once, in order; then score items of the longest list alone.

    Args:
        name: in the tables.
        config: its backend; `dtype` is not "auto".
        workload: the requests.
        precision: of the backend's linear layers.

    Raises:
        ConfigError: the model cannot be served.
        GpuscoreError: a case cannot be scored.
    """
    long = min(workload.cases, key=lambda case: (case.name not in LONG, -len(case.items)))
    with Scorer(config) as scorer:
        scorer.warmup()  # as a server does, so that the same code, such as CUDA graphs, runs
        results = {case.name: score_case(scorer, case) for case in workload.cases}
        alone = _alone(scorer, long, results[long.name])
    return Measured(
        *(name, model_name(config.model), config.dtype),
        workload=workload,
        results=results,
        alone=alone,
        deterministic=config.deterministic,
        precision=precision,
    )


def score_case(scorer: Scorer, case: Case) -> CaseResult:
    """Score a case; with softmax, without the log-sum-exp over the vocabulary, as over HTTP."""
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


def _alone(scorer: Scorer, case: Case, together: CaseResult) -> float:
    """Score some items alone; return the largest difference from their scores among all."""
    step = max(1, len(case.items) // ALONE)
    rows = range(0, len(case.items), step)
    items: Sequence[Any] = case.items
    scored = [
        score_case(
            scorer, replace(case, items=[items[row]], label_ids=[case.label_ids[row]])
        ).values[0]
        for row in rows
    ]
    return errors(np.stack(scored) - together.values[list(rows)]).maximum
