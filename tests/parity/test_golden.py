"""Promise: backends score the demo model as the golden bundles say, which are checked in; a bundle
that no longer fits the demo says how to renew it."""

from dataclasses import replace

import pytest

from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.measure.bundle import Bundle, write_bundle
from gpuscore.measure.gates import judge
from gpuscore.measure.oracle import run_oracle
from gpuscore.measure.runs import run_workload
from support.golden import DEMO, FOLDER, NAMES, REAL, golden, judged
from support.slow import slow

MOST_BYTES = 600_000  # of all bundles: they are in every checkout


def said(verdicts):
    return {(verdict.subject, verdict.gate): verdict for verdict in verdicts}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", "float32"),
        *slow(("torch", "bfloat16"), ("jax", "float32"), ("jax", "bfloat16")),
    ],
)
def test_a_backend_scores_as_before(backend, dtype):
    more = {"threads": 1} if backend == "torch" else {}
    more["max_batch_tokens"] = 512
    config = ModelConfig(str(DEMO), backend=backend, device="cpu", dtype=dtype, **more)
    run = run_workload(config, plan_backend(DEMO, config), golden("torch-float32").workload)
    verdicts = judged(run)
    assert {verdict.gate for verdict in verdicts} >= {"rank", "packing"}
    assert not [verdict for verdict in verdicts if verdict.passed is not True], (
        "no gate failed or was skipped"
    )


def test_the_bundles_agree_with_each_other():
    assert not [verdict for verdict in judged(golden("torch-float32")) if not verdict.passed]
    rounded = golden("transformers-bfloat16")
    states = {verdict.gate: verdict.passed for verdict in judged(rounded)}
    assert states == {
        "relative": True,
        "rank": True,
        "label mass": True,
        "packing": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_scores_as_before(dtype):
    """This notices a new release of transformers that would change the yardstick."""
    name = f"transformers-{dtype}"
    config = ModelConfig(str(DEMO), device="cpu", threads=1)
    again = run_oracle(DEMO, config, dtype, golden(name).workload)
    exact = golden("transformers-float32")
    rounded = None if dtype == "float32" else golden(name)
    assert not [verdict for verdict in judge(exact, again, rounded)[1] if verdict.failed]


def test_a_bundle_of_another_model_or_workload_is_outdated(tmp_path):
    bundle = golden("torch-float32")
    case = bundle.workload.cases[0]
    cases = (replace(case, temperature=9.0), *bundle.workload.cases[1:])
    for change, said in (
        ({"digests": replace(bundle.digests, weights="0" * 64)}, "of another model than demo, "),
        ({"workload": replace(bundle.workload, cases=cases)}, "of another workload; "),
    ):
        write_bundle(tmp_path / "torch-float32.json", Bundle({}, (replace(bundle, **change),)))
        with pytest.raises(AssertionError, match=f"{said}.*: make golden"):
            golden("torch-float32", tmp_path)


def test_the_bundles_are_small():
    assert {path.stem for path in FOLDER.iterdir()} == {*NAMES, REAL}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES
