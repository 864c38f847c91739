"""A workload's results as gpuscore computes them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuscore.config import ModelConfig
from gpuscore.config.options import options
from gpuscore.errors import ConfigError
from gpuscore.measure.results import CaseResult, Errors, Run, errors
from gpuscore.measure.workload import Case, Workload
from gpuscore.offline.scorer import Scorer
from gpuscore.types.results import Scores

_CHOICES = {item.name: item.choices for item in options(ModelConfig)}
_FRAMEWORKS, _ATTENTION = _CHOICES["backend"], _CHOICES["attention"]
_DEVICES = _CHOICES["device"]
DTYPES = ("float32", "bfloat16", "float16")
CONVERTED = "w8a16"  # weights of a quantised checkpoint, in the place of a dtype
TIMED = ("500 items", "long list")  # cases that are timed; else the case with most items is
ALONE = 8  # approximate number of its items that are scored once more, each alone


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend as `framework:dtype[:attention][@device]` on the command line.

    `CONVERTED` may stand in the dtype's place; the dtype is then "auto".
    """

    framework: str
    dtype: str
    attention: str = "auto"
    quantization: str = "auto"
    device: str | None = None  # None: the one of --device

    @classmethod
    def parse(cls, text: str) -> "BackendSpec":
        """Parse a backend; raise ConfigError if the text has another form."""
        named, at, device = text.partition("@")
        if at and device not in _DEVICES:
            raise ConfigError(
                f"--backends: {text!r} asks for device {device!r}; there are {', '.join(_DEVICES)}"
            )
        parts = named.split(":")
        formats = (*DTYPES, CONVERTED)
        if len(parts) not in (2, 3) or parts[0] not in _FRAMEWORKS or parts[1] not in formats:
            raise ConfigError(
                f"--backends: {named!r} is not framework:dtype[:attention][@device]; frameworks "
                f"are {', '.join(_FRAMEWORKS)}, dtypes {', '.join(DTYPES)}, or {CONVERTED} for the "
                "weights of a quantised checkpoint"
            )
        framework, kind, attention = parts if len(parts) == 3 else (*parts, "auto")
        if attention not in _ATTENTION:
            raise ConfigError(
                f"--backends: {named!r} asks for attention {attention!r}; there are "
                f"{', '.join(_ATTENTION)}"
            )
        dtype, quantization = ("auto", kind) if kind == CONVERTED else (kind, "auto")
        return cls(framework, dtype, attention, quantization, device or None)

    def __str__(self) -> str:
        ending = "" if self.attention == "auto" else f":{self.attention}"
        kind = self.dtype if self.quantization == "auto" else self.quantization
        place = "" if self.device is None else f"@{self.device}"
        return f"{self.framework}:{kind}{ending}{place}"

    def configure(self, base: ModelConfig) -> ModelConfig:
        """Return `base` with this backend."""
        return replace(
            base,
            backend=self.framework,
            dtype=self.dtype,
            attention=self.attention,
            quantization=self.quantization,
            device=self.device or base.device,
        )


def run_workload(
    name: str, config: ModelConfig, workload: Workload, precision: str = "full"
) -> Run:
    """Score every case once, in order; then measure the throughput and score items alone.

    Args:
        name: of the run.
        config: its backend; `dtype` is not "auto".
        workload: the requests.
        precision: of the backend's linear layers.

    Raises:
        ConfigError: the model cannot be served.
        GpuscoreError: a case cannot be scored.
    """
    timed = min(workload.cases, key=lambda case: (case.name not in TIMED, -len(case.items)))
    with Scorer(config) as scorer:
        scorer.warmup()  # as a server does, so that the same code, such as CUDA graphs, runs
        results = {case.name: score_case(scorer, case) for case in workload.cases}
        rate = _items_per_second(scorer, timed)
        alone = _alone(scorer, timed, results[timed.name])
    return Run(name, config.dtype, results, rate, alone, config.deterministic, precision)


def score_case(scorer: Scorer, case: Case) -> CaseResult:
    """Score a case; with softmax, without the log-sum-exp over the vocabulary, as over HTTP."""
    scores: Scores = scorer.score(
        case.query,
        case.items,
        labels=case.labels,
        label_token_ids=None if case.labels is not None else case.label_ids,
        apply_softmax=case.apply_softmax,
        temperature=case.temperature,
        item_first=case.item_first,
        logprobs=not case.apply_softmax,
    )
    if scores.logprobs is None:
        return CaseResult(np.log(scores.scores), None)
    if not np.allclose(scores.scores, np.exp(scores.logprobs), rtol=1e-6, equal_nan=True):
        raise ValueError(f"{case.name}: scores and log-probabilities contradict each other")
    return CaseResult(scores.logprobs, scores.label_mass)


def _items_per_second(scorer: Scorer, case: Case) -> float:
    """Measure the throughput with another query of the same length, which is not cached."""
    query: Any = case.query  # a text or a list of ids
    other = replace(case, query=query[1:] + query[:1])
    started = time.perf_counter()
    score_case(scorer, other)
    return len(case.items) / (time.perf_counter() - started)


def _alone(scorer: Scorer, case: Case, together: CaseResult) -> Errors:
    """Score some items alone and compare them with their scores among all, for gates 5 and 6."""
    step = max(1, len(case.items) // ALONE)
    rows = range(0, len(case.items), step)
    items: Sequence[Any] = case.items
    scored = [
        score_case(
            scorer, replace(case, items=[items[row]], label_ids=[case.label_ids[row]])
        ).values[0]
        for row in rows
    ]
    return errors(np.stack(scored) - together.values[list(rows)])
