"""The command `gpuscore parity trace`: the first layer in which a backend's error is too large."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError
from gpuscore.measure.parity.commands import vocabulary
from gpuscore.measure.parity.gates import RELATIVE
from gpuscore.measure.parity.measures import asked
from gpuscore.measure.parity.models import CutModels
from gpuscore.measure.parity.report import EXIT_FAILED, EXIT_OK
from gpuscore.measure.parity.results import Run
from gpuscore.measure.parity.runs import score_case
from gpuscore.measure.parity.workload import Case, Ids, Workload
from gpuscore.models.hub import model_directory
from gpuscore.offline.scorer import Scorer

# Relative L2 of log p that float32 may have; its sums of another order give 1e-6 to 1e-5.
FLOAT32 = 1e-4
LABELS, CASES, ITEMS, QUERY, ITEM = 32, 4, 4, 40, 12


def trace(values: argparse.Namespace, settings: Settings) -> int:
    """Compare ever longer beginnings of a model until the backend's error is too large."""
    from gpuscore.measure.parity.oracle import oracle_device, run_oracle

    base = settings.make(ModelConfig)
    directory = model_directory(base.model, base.revision)
    plan = plan_backend(directory, base)
    if plan.precision != "full":
        raise ConfigError(
            f"linear layers are in {plan.precision}; supported by this comparison: models without "
            "quantization, whose error can be compared with transformers' error"
        )
    dtype, device = plan.dtype_name, oracle_device(base.device)
    workload = _workload(values.seed, vocabulary(plan))

    def oracle(cut: Path, dtype: str) -> Run:
        return run_oracle(cut, workload, dtype, device, base.threads)

    print(f"{base.backend}:{dtype} on {plan.device_name}, transformers on {device}")
    print("layer  relative L2 of log p  at most", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = CutModels(directory, Path(folder))
        for layer in range(models.layers):
            cut = models.of(layer + 1)
            exact = oracle(cut, "float32")
            config = replace(base, model=str(cut), dtype=dtype)
            error = relative_l2(workload, exact, _score(config, workload))
            limit = FLOAT32
            if dtype != "float32":
                limit = RELATIVE * relative_l2(workload, exact, oracle(cut, dtype))
            print(f"{layer:>5}  {error:>20.2e}  {limit:>7.1e}", flush=True)
            if not error <= limit:  # NaN is too large as well
                print(f"layer {layer} is the first one whose error is too large")
                return EXIT_FAILED
    print("no layer has an error that is too large")
    return EXIT_OK


def relative_l2(workload: Workload, reference: Run, got: Run) -> float:
    """Return |got - reference| / |reference| of all log p; NaN if one is missing."""
    pairs = [
        tuple(run.results[case.name].values[asked(case)] for run in (reference, got))
        for case in workload.cases
    ]
    wanted, measured = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return float(np.linalg.norm(measured - wanted) / np.linalg.norm(wanted))


def _score(config: ModelConfig, workload: Workload) -> Run:
    with Scorer(config) as scorer:
        results = {case.name: score_case(scorer, case) for case in workload.cases}
    return Run(config.backend, config.dtype, results)


def _workload(seed: int, vocab: int) -> Workload:
    """Make a few prompts with many labels: a picture of the whole distribution."""
    rng = np.random.RandomState(seed)

    def ids(length: int) -> Ids:
        drawn: Ids = rng.randint(0, vocab, length).tolist()
        return drawn

    labels = [int(label) for label in rng.choice(vocab, min(LABELS, vocab), replace=False)]
    cases = tuple(
        Case(f"prompt {number}", ids(QUERY), [ids(ITEM) for _ in range(ITEMS)], [labels] * ITEMS)
        for number in range(CASES)
    )
    return Workload("trace", seed, 1, vocab, QUERY + ITEM, cases)
