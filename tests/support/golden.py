"""Golden bundles: scores of the demo model and of SmolLM2 that are checked in, made by `make
golden`."""

from dataclasses import replace
from pathlib import Path

import gpuscore
from gpuscore.measure.bundle import read_bundle
from gpuscore.measure.fingerprint import fingerprint
from gpuscore.measure.gates import Verdict, judge, packing
from gpuscore.measure.results import CaseResult, Measured
from gpuscore.measure.workload import make_workload, read_tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
DEMO = Path(gpuscore.__file__).parent / "demo"
NAMES = ("torch-float32", "transformers-float32", "transformers-bfloat16")
REAL = "smollm2-float32"  # transformers' scores of real sentences; tests/real_model uses it
RENEW = "after a wanted change: make golden"


def golden(name: str, folder: Path = FOLDER, model: Path = DEMO) -> Measured:
    """Read the scores of a model in a golden bundle.

    Raises:
        AssertionError: it was made of another model or of another workload.
    """
    (bundle,) = read_bundle(folder / f"{name}.json").servers
    assert bundle.workload is not None
    now_there = fingerprint(model)
    assert bundle.digests == now_there, (
        f"{name} is of another model than {model.name}, which is {now_there}; {RENEW}"
    )
    old = bundle.workload
    tokenizer = read_tokenizer(model)
    now = make_workload(old.size, old.seed, old.vocab_rows, old.context, tokenizer)
    assert bundle.workload.digest == now.digest, f"{name} is of another workload; {RENEW}"
    return bundle


def scored(
    results: dict[str, CaseResult], exact: Measured, name: str = "got", dtype: str = "float32"
) -> Measured:
    """Return scores of some of the cases that `exact` has, to be judged by it."""
    assert exact.workload is not None
    cases = tuple(case for case in exact.workload.cases if case.name in results)
    workload = replace(exact.workload, cases=cases)
    return Measured(name, exact.model, dtype, workload=workload, results=results)


def judged(got: Measured) -> list[Verdict]:
    """Judge scores of the golden workload, or of some of its cases, as `parity run` does.

    In float32 they are compared with the torch backend's bundle as well.
    """
    exact, verdicts = golden("transformers-float32"), [packing(got)]
    if got.dtype != "float32":
        return [*verdicts, *judge(exact, got, golden(f"transformers-{got.dtype}"))[1]]
    return [*verdicts, *judge(exact, got)[1], *judge(golden("torch-float32"), got)[1]]
