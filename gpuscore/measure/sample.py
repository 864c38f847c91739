"""A fixed sample of scores, which checks ways and servers before they are timed.

The cases and the gates are parity's. A way whose scores are wrong has no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpuscore.measure.apis import APIS, Rows
from gpuscore.measure.bundle import About, Measured
from gpuscore.measure.gates import judge_pair
from gpuscore.measure.load import Record
from gpuscore.measure.results import CaseResult, Run
from gpuscore.measure.scenarios import SEQUENTIAL, BenchRequest
from gpuscore.measure.targets import HttpTarget, refusal
from gpuscore.measure.workload import SAMPLE, Case, Workload
from gpuscore.types.batch import Float64Array

SMALLEST = 1e-300  # a probability of 0 has no logarithm
ALONE = "single"
# Items of a request, by the way's name; the cases are shorter than a request of the sequential way.
CHUNKS: Mapping[str, int | None] = {"packed": None, "sequential": min(5, SEQUENTIAL), ALONE: 1}


@dataclass(frozen=True, slots=True)
class Sampled:
    """A target's scores of the sample when all items travel together, if it has any, and the
    reasons for ways without right scores."""

    scored: Measured
    wrong: Mapping[str, str]


def take(target: HttpTarget, workload: Workload) -> Sampled:
    """Score the sample in every way and compare the ways with each other."""
    about = target.about
    if APIS[about.api].first_label_only:
        workload = narrow(workload)
    dtype = about.dtype if about.dtype in ("float32", "float16") else "bfloat16"
    runs: dict[str, Run] = {}
    wrong: dict[str, str] = {}
    for way, chunk in CHUNKS.items():
        try:
            results = {case.name: _scored(target, case, chunk) for case in workload.cases}
            runs[way] = Run(about.name, dtype, results)
        except ValueError as error:
            wrong[way] = str(error)
    alone = runs.get(ALONE)  # items that travel alone cannot disturb each other
    for way, run in runs.items():
        if alone is not None and run is not alone and (why := disagreement(workload, alone, run)):
            wrong[way] = f"wrong scores: {why}"
    first = runs.get("packed")
    return Sampled(Measured(about, workload if first else None, first), wrong)


def _scored(target: HttpTarget, case: Case, chunk: int | None) -> CaseResult:
    """Score a case, `chunk` items a request; raise ValueError with the server's words."""
    api = APIS[target.about.api]
    asks = [*BenchRequest(case.query, case.items).chunks(chunk)]
    labels = case.label_ids[0]
    record, rows = target.send(api, asks, labels=labels), Rows()
    for number, ask in enumerate(asks):
        if record.status[number] != 200:
            raise ValueError(trouble(record, number))
        rows += api.read(record.bodies[number], len(ask.items))
    values: Float64Array = np.log(np.maximum(np.array(rows, dtype=np.float64), SMALLEST))
    if values.shape != (len(case.items), len(labels)):
        raise ValueError(f"scores of shape {values.shape}, not {(len(case.items), len(labels))}")
    return CaseResult(values, None)


def trouble(record: Record, number: int) -> str:
    """Return why a request has no scores."""
    if not record.status[number]:
        return record.lost_because or "no answer"
    return f"status {record.status[number]}: {refusal(record.bodies[number])}"


def disagreement(workload: Workload, reference: Run, got: Run) -> str | None:
    """Return the first gate that two runs fail, with its numbers; None if they agree."""
    verdicts = judge_pair(workload, reference, got)[1]
    return next(
        (f"{verdict.gate}: {verdict.detail}" for verdict in verdicts if verdict.failed), None
    )


def in_common(first: Measured, second: Measured) -> tuple[Workload, Run, Run] | str:
    """Return the scores that both have, perhaps of the first labels only, or why there are none."""
    kinds = [APIS[scored.about.api].kind for scored in (first, second)]
    if kinds[0] != kinds[1]:
        return f"the APIs {first.about.api} and {second.about.api} have no scores in common"
    digests = first.model, second.model
    if None in digests and model_of(first.about) != model_of(second.about):
        return f"the models are called {first.about.model} and {second.about.model}"
    one, two = first.workload, second.workload
    if one is None or two is None or first.run is None or second.run is None:
        return "one has no scores of the sample"
    if one.digest == two.digest:
        return one, first.run, second.run
    if narrow(one).digest == narrow(two).digest:
        return narrow(one), _first_label(first.run), _first_label(second.run)
    named = [f"{made.named}, of {made.vocab_rows:,} token ids" for made in (one, two)]
    return f"the workloads are {named[0]}, and {named[1]}; bench has that of --workload {SAMPLE}"


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


def _first_label(run: Run) -> Run:
    results = {name: CaseResult(result.values[:, :1], None) for name, result in run.results.items()}
    return replace(run, results=results)
