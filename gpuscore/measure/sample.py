"""A fixed sample of scores, which checks ways and servers before they are timed.

The cases and the gates are parity's. A way whose scores are wrong has no time.
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

SMALLEST = 1e-300  # a probability of 0 has no logarithm
ALONE = "single"
# Items of a request, by the way's name; the cases are shorter than a request of the sequential way.
CHUNKS: Mapping[str, int | None] = {"packed": None, "sequential": min(5, SEQUENTIAL), ALONE: 1}


def take(target: HttpTarget, workload: Workload) -> None:
    """Score the sample in every way, compare the ways with each other, and keep the scores of all
    items together."""
    ways: dict[str, Measured] = {}
    for way, chunk in CHUNKS.items():
        try:
            results = {case.name: _scored(target, case, chunk) for case in workload.cases}
            ways[way] = replace(target.server, workload=workload, results=results)
        except ValueError as error:
            target.wrong[way] = str(error)
    alone = ways.get(ALONE)  # items that travel alone cannot disturb each other
    for way, scored in ways.items():
        if alone is not None and scored is not alone and (why := disagreement(alone, scored)):
            target.wrong[way] = f"wrong scores: {why}"
    target.server = ways.get("packed", target.server)


def _scored(target: HttpTarget, case: Case, chunk: int | None) -> CaseResult:
    """Score a case, `chunk` items a request; raise ValueError with the server's words."""
    api = APIS[target.server.api]
    asks = [*BenchRequest(case.query, case.items).chunks(chunk)]
    labels = case.label_ids[0]
    shape = (len(case.items), len(case.label_ids[0]))
    parts = []
    # Where only the first label has a score, each of them is asked for as the first one.
    for first in range(len(labels) if api.gives != EVERY else 1):
        record = target.send(api, asks, labels=[*labels[first:], *labels[:first]])
        rows = Rows()
        for number, ask in enumerate(asks):
            if record.status[number] != 200:
                raise ValueError(trouble(record, number))
            rows += api.read(record.bodies[number], ask)
        parts.append(np.array(rows, dtype=np.float64))
    values: Float64Array = np.log(np.maximum(np.concatenate(parts, axis=1), SMALLEST))
    if values.shape != shape:
        raise ValueError(f"scores of shape {values.shape}, not {shape}")
    return CaseResult(values)


def trouble(record: Record, number: int) -> str:
    """Return why a request has no scores."""
    if not record.status[number]:
        return record.lost_because or "no answer"
    return f"status {record.status[number]}: {refusal(record.bodies[number])}"


def disagreement(first: Measured, second: Measured) -> str | None:
    """Return the first gate that two fail, with its numbers; None if they agree."""
    failed = (verdict for verdict in judge(first, second)[1] if verdict.failed)
    return next((f"{verdict.gate}: {verdict.detail}" for verdict in failed), None)


def difference(first: Measured, second: Measured) -> str | None:
    """Return why the scores of two cannot be compared; None if they can."""
    if (APIS[first.api].gives == BEST) != (APIS[second.api].gives == BEST):
        return f"the APIs {first.api} and {second.api} have no scores in common"
    if None in (first.digests, second.digests) and model_of(first) != model_of(second):
        return f"the models are called {first.model} and {second.model}"
    one, two = first.workload, second.workload
    if one is None or two is None:
        return "one has no scores of the sample"
    if one.digest == two.digest:
        return None
    named = [f"{made.named}, of {made.vocab_rows:,} token ids" for made in (one, two)]
    return f"the workloads are {named[0]}, and {named[1]}; bench has that of --workload {SAMPLE}"


def model_of(server: Measured) -> str:
    """Return a model's name, for comparisons: the last part of the one that its server gives it,
    which is the name of its directory."""
    return server.model.rstrip("/").rpartition("/")[2].lower()
