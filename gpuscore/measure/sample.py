"""Checks a server's scores on a fixed sample in each mode, before it is timed.

`parity` has the same cases and gates. A mode whose scores are wrong is not timed.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpuscore.measure.apis import APIS, BEST, EVERY, Rows
from gpuscore.measure.gates import judge
from gpuscore.measure.load import Record
from gpuscore.measure.results import CaseResult, Measured
from gpuscore.measure.scenarios import SEQUENTIAL, BenchRequest
from gpuscore.measure.targets import HttpTarget, refusal
from gpuscore.measure.workload import SAMPLE, Case, Workload
from gpuscore.types.batch import Float64Array

SMALLEST = 1e-300  # stands for a probability of 0, which has no logarithm
ALONE = "single"
# Items of a request in each mode, None = all; 5 divides the cases, which have under SEQUENTIAL.
CHUNKS: Mapping[str, int | None] = {"packed": None, "sequential": min(5, SEQUENTIAL), ALONE: 1}


def check_sample(target: HttpTarget, workload: Workload) -> None:
    """Score the sample in every mode. Store the packed scores in `target.server`, and in
    `target.wrong` each mode that disagrees with items sent one by one."""
    modes: dict[str, Measured] = {}
    for mode, chunk in CHUNKS.items():
        try:
            results = {case.name: _scored(target, case, chunk) for case in workload.cases}
            modes[mode] = replace(target.server, workload=workload, results=results)
        except ValueError as error:
            target.wrong[mode] = str(error)
    alone = modes.get(ALONE)  # items sent one by one cannot affect each other
    for mode, scored in modes.items():
        if alone is not None and scored is not alone and (why := disagreement(alone, scored)):
            target.wrong[mode] = f"wrong scores: {why}"
    target.server = modes.get("packed", target.server)


def _scored(target: HttpTarget, case: Case, chunk: int | None) -> CaseResult:
    """Score a case, `chunk` items per request; raise ValueError with the server's message."""
    api = APIS[target.server.api]
    asks = [*BenchRequest(case.query, case.items).chunks(chunk)]
    labels = case.label_ids[0]
    shape = (len(case.items), len(case.label_ids[0]))
    parts = []
    # If an API scores only the first label, move each label to the front in turn.
    for first in range(len(labels) if api.gives != EVERY else 1):
        record = target.send(api, asks, labels=[*labels[first:], *labels[:first]])
        rows = Rows()
        for number, ask in enumerate(asks):
            if record.status[number] != 200:
                raise ValueError(failure(record, number))
            rows += api.read(record.bodies[number], ask)
        parts.append(np.array(rows, dtype=np.float64))
    values: Float64Array = np.log(np.maximum(np.concatenate(parts, axis=1), SMALLEST))
    if values.shape != shape:
        raise ValueError(f"scores of shape {values.shape}, not {shape}")
    return CaseResult(values)


def failure(record: Record, number: int) -> str:
    """Return why a request has no scores."""
    if not record.status[number]:
        return record.lost_because or "no answer"
    return f"status {record.status[number]}: {refusal(record.bodies[number])}"


def disagreement(first: Measured, second: Measured) -> str | None:
    """Return the first gate that the comparison fails, with its numbers; None if it passes all."""
    failed = (verdict for verdict in judge(first, second)[1] if verdict.failed)
    return next((f"{verdict.gate}: {verdict.detail}" for verdict in failed), None)


def not_comparable(first: Measured, second: Measured) -> str | None:
    """Return why the scores of two servers cannot be compared; None if they can."""
    if (APIS[first.api].gives == BEST) != (APIS[second.api].gives == BEST):
        return f"the APIs {first.api} and {second.api} have no scores in common"
    if None in (first.digests, second.digests) and model_of(first) != model_of(second):
        return f"the models are called {first.model} and {second.model}"
    one = first.workload
    two = second.workload
    if one is None or two is None:
        return "one of them has no scores of the sample"
    if one.digest == two.digest:
        return None
    names = [f"{workload.named}, of {workload.vocab_rows:,} token ids" for workload in (one, two)]
    return f"the workloads are {names[0]}, and {names[1]}; bench scores --workload {SAMPLE}"


def model_of(server: Measured) -> str:
    """Return the name to compare models by: the last part of the name that the server gives,
    usually the model's directory."""
    return server.model.rstrip("/").rpartition("/")[2].lower()
