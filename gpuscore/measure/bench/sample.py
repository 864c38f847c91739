"""A fixed sample of scores, which checks ways and servers before they are timed.

The cases and the gates are parity's, with wider limits in half precision. A way whose scores are
wrong has no time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuscore.measure.bench.apis import APIS, OWN_PROMPTS
from gpuscore.measure.bench.load import Record
from gpuscore.measure.bench.scenarios import SEQUENTIAL, BenchRequest
from gpuscore.measure.bench.targets import SAFE_VOCAB, About, Answerer, refusal
from gpuscore.measure.parity.gates import HalfLimits, judge_pair
from gpuscore.measure.parity.results import CaseResult, Run
from gpuscore.measure.parity.workload import SAMPLE, SAMPLE_CONTEXT, Case, Workload, sample
from gpuscore.types.batch import Float64Array

SMALLEST = 1e-300  # a probability of 0 has no logarithm
# Of half precision: honest rounding must not count as wrong. On SmolLM2 transformers in bfloat16 is
# 0.23 off at p99, and two such runs differ by more than one does from float32.
HALF = HalfLimits(0.5, 1.0, 0.02)
ALONE, DIVIDED = "single", "sequential"
# Items of a request, by the way's name; the cases are shorter than a request of the sequential way.
CHUNKS: Mapping[str, int | None] = {"packed": None, DIVIDED: min(5, SEQUENTIAL), ALONE: 1}
TEXTS = (
    (
        " a small blue chair",
        (" The chair is blue.", " A red lamp.", " A little navy seat.", " No."),
    ),
    (
        " a lamp of steel",
        (" The chair is blue.", " A steel lamp.", " Wood.", " A lamp.", " It is."),
    ),
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A target's scores of the sample, by way, and the reasons for ways without scores."""

    workload: Workload
    runs: Mapping[str, Run]
    wrong: Mapping[str, str]

    @property
    def first(self) -> Run | None:
        return self.runs.get("packed")


def sample_of(vocab: int | None, texts: bool) -> Workload:
    """Return the sample, the same for all servers of a model."""
    if texts:
        cases = tuple(
            Case(f"text {number}", query, list(items), [[0]] * len(items))
            for number, (query, items) in enumerate(TEXTS, start=1)
        )
        return Workload(SAMPLE, 0, 1, 0, SAMPLE_CONTEXT, cases)
    return sample(vocab or SAFE_VOCAB)


def take(target: Answerer, workload: Workload) -> Sampled:
    """Score the sample in every way and compare the ways with each other."""
    if APIS[target.about.api].first_label_only:
        workload = narrow(workload)
    runs: dict[str, Run] = {}
    wrong: dict[str, str] = {}
    for way, chunk in CHUNKS.items():
        try:
            runs[way] = _run(f"{target.about.name}, {way}", target, workload, chunk)
        except ValueError as error:
            wrong[way] = str(error)
    alone = runs.get(ALONE)  # items that travel alone cannot disturb each other
    for way, run in runs.items():
        if alone is not None and run is not alone and (why := disagreement(workload, alone, run)):
            wrong[way] = f"wrong scores: {why}"
    return Sampled(workload, runs, wrong)


def not_comparable(first: About, second: About) -> str | None:
    """Return why the scores of two servers need not be equal; None if they must be."""
    kinds = APIS[first.api].kind, APIS[second.api].kind
    if kinds[0] != kinds[1] or OWN_PROMPTS in kinds:
        return f"the APIs {first.api} and {second.api} have no scores in common"
    if model_of(first) != model_of(second):
        return f"the models are called {first.model} and {second.model}"
    return None


def model_of(about: About) -> str:
    """Return a model's name, for comparisons: the last part of the one that its server gives it,
    which is the name of its directory."""
    return about.model.rstrip("/").rpartition("/")[2].lower()


def narrow(workload: Workload) -> Workload:
    """Return the workload with the first label of each item alone."""
    cases = [
        replace(case, label_ids=[ids[:1] for ids in case.label_ids]) for case in workload.cases
    ]
    return replace(workload, cases=tuple(cases))


def common(
    first: Workload, of_one: Run, second: Workload, of_two: Run
) -> tuple[Workload, Run, Run] | None:
    """Return the scores that both samples have, perhaps for the first labels only, or None."""
    if first.digest == second.digest:
        return first, of_one, of_two
    workload = narrow(first)
    if workload.digest != narrow(second).digest:
        return None
    return workload, _first_label(of_one), _first_label(of_two)


def _first_label(run: Run) -> Run:
    results = {name: CaseResult(result.values[:, :1], None) for name, result in run.results.items()}
    return replace(run, results=results)


def disagreement(workload: Workload, reference: Run, got: Run) -> str | None:
    """Return the first gate that two runs fail, with its numbers; None if they agree."""
    verdicts = judge_pair(workload, reference, got, HALF)[1]
    return next(
        (f"{verdict.gate}: {verdict.detail}" for verdict in verdicts if verdict.failed), None
    )


def _run(name: str, target: Answerer, workload: Workload, chunk: int | None) -> Run:
    results = {case.name: _scored(target, case, chunk) for case in workload.cases}
    dtype = target.about.dtype
    return Run(name, dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16", results)


def _scored(target: Answerer, case: Case, chunk: int | None) -> CaseResult:
    """Score a case, `chunk` items a request; raise ValueError with the server's words."""
    api = APIS[target.about.api]
    asks = [*BenchRequest(case.query, case.items).chunks(chunk)]
    labels = case.label_ids[0]
    record = target.send(api, asks, labels=labels)
    rows = answers(record, asks, api.read)
    values: Float64Array = np.log(np.maximum(np.array(rows, dtype=np.float64), SMALLEST))
    if values.shape != (len(case.items), len(labels)):
        raise ValueError(f"scores of shape {values.shape}, not {(len(case.items), len(labels))}")
    return CaseResult(values, None)


def answers(
    record: Record, asks: Sequence[BenchRequest], read: Callable[[bytes, int], list[list[float]]]
) -> list[list[float]]:
    """Return the rows of all requests' items; raise ValueError if one has no valid answer."""
    rows: list[list[float]] = []
    for number, ask in enumerate(asks):
        if record.status[number] != 200:
            raise ValueError(trouble(record, number))
        try:
            rows += read(record.bodies[number], len(ask.items))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"no scores in an answer: {error}") from error
    return rows


def trouble(record: Record, number: int) -> str:
    """Return why a request has no scores."""
    if not record.status[number]:
        return record.lost_because or "no answer"
    return f"status {record.status[number]}: {refusal(record.bodies[number])}"
