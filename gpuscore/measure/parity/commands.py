"""The commands `gpuscore parity run`, `record` and `compare`."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

from gpuscore.backends import Plan, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.config.sources import DEFAULT, Settings
from gpuscore.errors import ConfigError
from gpuscore.measure.machine import environment, hardware, hardware_text
from gpuscore.measure.parity.bundle import Bundle, read_bundle, refuse_different, write_bundle
from gpuscore.measure.parity.gates import Comparison, Verdict, judge, judge_pair, packing
from gpuscore.measure.parity.measures import differences
from gpuscore.measure.parity.metrics import errors
from gpuscore.measure.parity.models import fingerprint
from gpuscore.measure.parity.report import EXIT_OK, conclude, listed, now, speed
from gpuscore.measure.parity.results import Run
from gpuscore.measure.parity.runs import BackendSpec, run_workload
from gpuscore.measure.parity.workload import (
    TEXT,
    Workload,
    make_workload,
    query_numbers,
    read_tokenizer,
)
from gpuscore.measure.progress import progress
from gpuscore.measure.reports import aligned
from gpuscore.models.hub import model_directory, model_name
from gpuscore.system.machine import versions

_OF_BACKENDS = ("backend", "attention", "quantization")
_LOCAL = ("model",)  # flags with local paths, which a bundle leaves out


def run(values: argparse.Namespace, settings: Settings) -> int:
    """Compare every backend with transformers, and backends of the same format with each other."""
    specs = [BackendSpec.parse(text) for text in values.backends.split(",")]
    _refuse(settings, "--backends, which sets it for each backend", ("dtype", *_OF_BACKENDS))
    base = settings.make(ModelConfig)
    if len(set(specs)) < len(specs):
        raise ConfigError("--backends names a backend twice")
    directory = model_directory(base.model, base.revision)
    # Before minutes of work, to refuse a bad one and to know what "auto" means.
    configs = {str(spec): spec.configure(base) for spec in specs}
    plans = {name: plan_backend(directory, config) for name, config in configs.items()}
    workload = _workload(directory, plans[str(specs[0])], values)

    from gpuscore.measure.parity.oracle import free_memory, oracle_device, run_oracle

    device = oracle_device(base.device)
    frameworks = {spec.framework for spec in specs}
    about = {**_facts(model_name(base.model), workload), "oracle": f"transformers on {device}"}
    print(_lines(about), flush=True)
    halves = sorted({plan.dtype_name for plan in plans.values()} - {"float32"})
    runs = []
    with progress(workload.num_items * (1 + len(halves) + len(plans))) as begin:
        exact, *others = (
            run_oracle(
                directory, workload, dtype, device, base.threads, begin(f"transformers:{dtype}")
            )
            for dtype in ("float32", *halves)
        )
        for name, plan in plans.items():
            config = replace(configs[name], dtype=plan.dtype_name)
            runs.append(run_workload(name, config, workload, plan.precision, begin(name)))
            free_memory()
    reference = OracleRuns(exact, dict(zip(halves, others, strict=True)))
    comparisons, verdicts = reference.judge(workload, runs)
    for first, second in combinations(runs, 2):
        if first.dtype == second.dtype and first.in_eight_bits == second.in_eight_bits:
            verdicts += judge_pair(workload, first, second)[1]
    title = f"Parity of {model_name(base.model)} with transformers in float32"
    machine = hardware_text(hardware("jax" if "jax" in frameworks else "torch"))
    about |= {"date": now(), "hardware": machine, "versions": listed(versions())}
    against = "against transformers in float32, unless another run is named"
    return conclude(title, about, workload, comparisons, verdicts, values.report, against)


def record(values: argparse.Namespace, settings: Settings) -> int:
    """Score the workload with one backend, or with the oracle, and write a bundle."""
    config = settings.make(ModelConfig)
    output = Path(values.output)
    if output.exists():  # refused before minutes of work
        raise ConfigError(f"--output {output} exists already")
    if values.oracle:
        _refuse(settings, "--oracle, which runs transformers", _OF_BACKENDS)
    directory = model_directory(config.model, config.revision)
    plan = plan_backend(directory, config)  # says what "auto" means on this machine
    workload = _workload(directory, plan, values)
    print(_lines(_facts(model_name(config.model), workload)), flush=True)
    with progress(workload.num_items) as begin:
        if values.oracle:
            from gpuscore.measure.parity.oracle import oracle_device, run_oracle

            dtype, device = plan.dtype_name, oracle_device(config.device)
            scored = begin("transformers")
            run = run_oracle(directory, workload, dtype, device, config.threads, scored)
        else:
            precision = "auto" if plan.precision == "full" else plan.precision
            spec = BackendSpec(config.backend, plan.dtype_name, config.attention, precision)
            name, device = str(spec), plan.device_name
            planned = replace(config, dtype=plan.dtype_name)
            run = run_workload(name, planned, workload, plan.precision, begin(name))
    about = {
        "model_name": model_name(config.model),
        "device": device,
        "created": now(),
        "versions": versions(),
        "hardware": hardware(config.backend),
        "environment": environment(),
        "flags": {name: value for name, value in asdict(config).items() if name not in _LOCAL},
    }
    write_bundle(output, Bundle(run, workload, fingerprint(directory), about))
    print(f"wrote {output}")
    return EXIT_OK


def compare(values: argparse.Namespace, settings: Settings) -> int:
    """Compare bundles: every pair, or with --reference each with the oracle's."""
    places = [*values.bundles, *(values.reference or ())]
    if len(values.bundles) < (1 if values.reference else 2):
        raise ConfigError(
            "one bundle has nothing to be compared with: name a second one, or --reference"
        )
    bundles = [read_bundle(Path(place)) for place in places]
    for other in bundles[1:]:
        refuse_different(bundles[0], other)
    facts = {
        str(place): f"{bundle.run.name} on {hardware_text(bundle.about.get('hardware'))}, "
        f"{speed(bundle.run)}"
        for place, bundle in zip(places, bundles, strict=True)
    }
    for place, what in facts.items():
        print(f"{place}: {what}")
    for place, bundle in zip(places, bundles, strict=True):
        facts[f"{place}, versions"] = listed(bundle.about.get("versions"))
        facts[f"{place}, environment"] = listed(bundle.about.get("environment"))
        facts[f"{place}, made"] = str(bundle.about.get("created", "unknown"))
    facts["date"] = now()
    runs = [
        replace(bundle.run, name=f"{Path(place).name} ({bundle.run.name})")
        for place, bundle in zip(places, bundles, strict=True)
    ]
    workload, count = bundles[0].workload, len(values.bundles)
    if values.reference:
        reference = OracleRuns.of(runs[count:])
        comparisons, verdicts = reference.judge(workload, runs[:count])
        against = f"against {reference.exact.name}"
    else:
        comparisons, verdicts = _pairs(workload, runs)
        against = (
            f"against {comparisons[0].reference.name}" if count == 2 else "of every pair of bundles"
        )
    if count > 2:
        print(f"\np99 |d log p| of every pair\n{_matrix(workload, runs[:count])}")
    title = f"Parity of {'two' if count == 2 else count} bundles"
    return conclude(title, facts, workload, comparisons, verdicts, values.report, against)


@dataclass(frozen=True, slots=True)
class OracleRuns:
    """Runs of the oracle: exact, and rounded to formats of half precision."""

    exact: Run
    rounded: dict[str, Run]  # by dtype

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "OracleRuns":
        """Tell the runs apart by their dtype.

        Raises:
            ConfigError: no run is float32, or two runs have the same dtype.
        """
        by_dtype = {run.dtype: run for run in runs}
        if len(by_dtype) < len(runs) or any(run.precision != "full" for run in runs):
            raise ConfigError(
                "--reference takes one bundle in float32 and at most one for each other dtype, "
                f"without quantization; these are {', '.join(run.name for run in runs)}"
            )
        if "float32" not in by_dtype:
            raise ConfigError(f"--reference has no bundle in float32, only {', '.join(by_dtype)}")
        exact = by_dtype.pop("float32")
        return cls(exact, by_dtype)

    def judge(
        self, workload: Workload, runs: Sequence[Run]
    ) -> tuple[list[Comparison], list[Verdict]]:
        """Judge each run as `parity run` does.

        Raises:
            ConfigError: there is no rounded run for the dtype of a run.
        """
        comparisons, verdicts = [], []
        for yardstick in self.rounded.values():  # for the table only, without verdicts
            comparisons.append(judge(workload, self.exact, yardstick, yardstick)[0])
        for run in runs:
            needs = run.dtype != "float32" and not run.in_eight_bits
            if needs and run.dtype not in self.rounded:
                raise ConfigError(
                    f"{run.name} is in {run.dtype}: --reference needs transformers in {run.dtype} "
                    f"beside {self.exact.name} (gpuscore parity record --oracle --dtype "
                    f"{run.dtype})"
                )
            comparison, more = judge(workload, self.exact, self.rounded.get(run.dtype), run)
            comparisons.append(comparison)
            verdicts += more
        return comparisons, verdicts


def _workload(directory: Path, plan: Plan, values: argparse.Namespace) -> Workload:
    tokenizer = read_tokenizer(directory)
    size = values.workload or ("standard" if tokenizer is None else TEXT)
    return make_workload(
        size, values.seed, _vocabulary(plan), plan.max_model_len, tokenizer, values.seeds
    )


def _vocabulary(plan: Plan) -> int:
    """Return the number of a language model's token ids; raise ConfigError for another model."""
    model = plan.architecture.config
    if model.classes is not None:
        raise ConfigError(
            f"config.json: architectures is {model.architecture!r}; supported by this comparison: "
            "language models, whose labels are tokens"
        )
    return model.vocab_size


def _refuse(settings: Settings, other: str, names: Iterable[str]) -> None:
    """Raise ConfigError if one of these flags is set beside another one, which excludes it."""
    for name in names:
        if settings.chosen[name].source != DEFAULT:
            raise ConfigError(f"--{name} is set beside {other}")


def _lines(facts: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {what}" for name, what in facts.items())


def _facts(model: str, workload: Workload) -> dict[str, str]:
    queries = len(set(query_numbers(workload).values()))
    longest = max(len(ids) for case in workload.cases for ids in case.prompt_ids())
    facts = {
        "model": model,
        "workload": f"{workload.named}: {len(workload.cases)} requests of "
        f"{queries} queries, {workload.num_items} items, prompts of up to {longest} tokens, "
        f"SHA-256 {workload.digest[:16]}",
    }
    if workload.left_out:
        facts["left out"] = "; ".join(workload.left_out)
    return facts


def _matrix(workload: Workload, runs: Sequence[Run]) -> str:
    """Return the table of the p99 differences in log p between all runs."""
    rows = [
        [first.name] + [f"{errors(differences(workload, first, two)[0]).p99:.1e}" for two in runs]
        for first in runs
    ]
    return aligned(["", *(run.name for run in runs)], rows)


def _pairs(workload: Workload, runs: Sequence[Run]) -> tuple[list[Comparison], list[Verdict]]:
    comparisons, verdicts = [], []
    for first, second in combinations(runs, 2):
        comparison, more = judge_pair(workload, first, second)
        comparisons.append(comparison)
        verdicts += more
    return comparisons, [*verdicts, *map(packing, runs)]
