"""Golden bundles: scores of the demo model and of SmolLM2 that are checked in, made by `make
golden`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gpuscore
from gpuscore.measure.bundle import Measured, read_bundle
from gpuscore.measure.fingerprint import fingerprint
from gpuscore.measure.gates import Verdict, judge, judge_pair
from gpuscore.measure.results import Run
from gpuscore.measure.workload import Case, make_workload, read_tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
DEMO = Path(gpuscore.__file__).parent / "demo"
NAMES = ("torch-float32", "transformers-float32", "transformers-bfloat16")
REAL = "smollm2-float32"  # transformers' scores of real sentences; tests/real_model uses it
RENEW = "after a wanted change: make golden"


def golden(name: str, folder: Path = FOLDER, model: Path = DEMO) -> Measured:
    """Read a golden bundle of a model: its scores.

    Raises:
        AssertionError: it was made of another model or of another workload.
    """
    (bundle,) = read_bundle(folder / name).servers
    assert bundle.workload is not None
    now_there = fingerprint(model)
    assert bundle.model == now_there, (
        f"{name} is of another model than {model.name}, which is {now_there}; {RENEW}"
    )
    old = bundle.workload
    tokenizer = read_tokenizer(model)
    now = make_workload(old.size, old.seed, old.vocab_rows, old.context, tokenizer)
    assert bundle.workload.digest == now.digest, f"{name} is of another workload; {RENEW}"
    return bundle


def judged(run: Run, only: Callable[[Case], bool] = lambda case: True) -> list[Verdict]:
    """Judge a run of the golden workload, or some of its cases, as `parity run` does.

    In float32 it is compared with the torch backend's bundle as well.
    """
    exact = golden("transformers-float32")
    workload = replace(exact.workload, cases=tuple(filter(only, exact.workload.cases)))
    if run.dtype != "float32":
        return judge(workload, exact.run, golden(f"transformers-{run.dtype}").run, run)[1]
    pair = judge_pair(workload, golden("torch-float32").run, run)[1]
    return [*judge(workload, exact.run, None, run)[1], *pair]
