"""The commands `gpuscore parity run`, `record` and `compare`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.config.sources import DEFAULT, Settings
from gpuscore.errors import ConfigError
from gpuscore.hub import model_directory, model_name
from gpuscore.parity.bundle import Bundle, read_bundle, refuse_different, write_bundle
from gpuscore.parity.fingerprint import fingerprint
from gpuscore.parity.gates import Comparison, Verdict, judge, judge_pair, packing
from gpuscore.parity.machine import hardware, versions
from gpuscore.parity.progress import comparing
from gpuscore.parity.runs import BackendSpec, run_workload
from gpuscore.parity.table import ABOUT_RANKS, HEAD, row, verdict_line
from gpuscore.parity.workload import Workload, make_workload, read_tokenizer
from gpuscore.reports import aligned

EXIT_OK, EXIT_FAILED = 0, 1
_LOCAL = ("model", "compile_cache")  # flags with local paths, which a bundle leaves out


def run(values: argparse.Namespace, settings: Settings) -> int:
    """Compare every backend with transformers, and backends of the same format with each other."""
    specs = [BackendSpec.parse(text) for text in values.backends.split(",")]
    _refuse_overridden(settings)
    base = settings.make(ModelConfig)
    if len(set(specs)) < len(specs):
        raise ConfigError("--backends names a backend twice")
    directory = model_directory(base.model, base.revision)
    # Before minutes of work, to refuse a bad one and to know what "auto" means.
    planned = {str(spec): _planned(directory, spec.configure(base)) for spec in specs}
    workload = _workload(directory, planned[str(specs[0])][0], values)

    from gpuscore.parity.oracle import free_memory, oracle_device, run_oracle

    device = oracle_device(base.device)
    machine = {"hardware": hardware(specs[0].framework)}
    about = {**_facts(model_name(base.model), workload), "oracle": f"transformers on {device}"}
    print(_lines(about), flush=True)
    halves = sorted({config.dtype for config, _ in planned.values()} - {"float32"})
    runs = []
    with comparing(workload, 1 + len(halves) + len(planned)) as begin:
        exact, *others = (
            run_oracle(directory, workload, dtype, device, begin(f"transformers:{dtype}"))
            for dtype in ("float32", *halves)
        )
        for name, (config, precision) in planned.items():
            runs.append(run_workload(name, config, workload, precision, begin(name)))
            free_memory()
    rounded = dict(zip(halves, others, strict=True))
    comparisons, verdicts = [], []
    for yardstick in rounded.values():  # for the table only, without verdicts
        comparisons.append(judge(workload, exact, yardstick, yardstick)[0])
    for one in runs:
        found, more = judge(workload, exact, rounded.get(one.dtype), one)
        comparisons.append(found)
        verdicts += more
    for first, second in combinations(runs, 2):
        if first.dtype == second.dtype and first.in_eight_bits == second.in_eight_bits:
            verdicts += judge_pair(workload, first, second)[1]
    title = f"Parity of {model_name(base.model)} with transformers in float32"
    about |= {"date": _now(), "hardware": _hardware(machine), "versions": _listed(versions())}
    reference = "against transformers in float32, unless another run is named"
    return _conclude(title, about, workload, comparisons, verdicts, values.report, reference)


def record(values: argparse.Namespace, settings: Settings) -> int:
    """Score the workload with one backend and write a bundle."""
    config = settings.make(ModelConfig)
    output = Path(values.output)
    if output.exists():  # refused before minutes of work
        raise ConfigError(f"--output {output} exists already")
    directory = model_directory(config.model, config.revision)
    workload = _workload(directory, config, values)
    print(_lines(_facts(model_name(config.model), workload)), flush=True)
    plan = plan_backend(directory, config)  # says what "auto" means on this machine
    spec = BackendSpec(config.backend, plan.dtype_name, config.attention)
    if plan.precision != "full":
        spec = replace(spec, quantization=plan.precision)
    config, precision = _planned(directory, config)
    with comparing(workload, 1) as begin:
        found = run_workload(str(spec), config, workload, precision, begin(str(spec)))
    about = {
        "model_name": model_name(config.model),
        "device": plan.device_name,
        "created": _now(),
        "versions": versions(),
        "hardware": hardware(config.backend),
        "flags": {name: value for name, value in asdict(config).items() if name not in _LOCAL},
    }
    write_bundle(output, Bundle(found, workload, fingerprint(directory), about))
    print(f"wrote {output}")
    return EXIT_OK


def compare(values: argparse.Namespace) -> int:
    """Compare two bundles."""
    a, b = read_bundle(Path(values.a)), read_bundle(Path(values.b))
    refuse_different(a, b)
    facts = {
        str(place): f"{bundle.run.name} on {_hardware(bundle.about)}"
        for place, bundle in ((values.a, a), (values.b, b))
    }
    for place, what in facts.items():
        print(f"{place}: {what}")
    for place, bundle in ((values.a, a), (values.b, b)):
        facts[f"{place}, versions"] = _listed(bundle.about.get("versions"))
        facts[f"{place}, made"] = str(bundle.about.get("created", "unknown"))
    one, two = (
        replace(bundle.run, name=f"{Path(place).name} ({bundle.run.name})")
        for place, bundle in ((values.a, a), (values.b, b))
    )
    found, verdicts = judge_pair(a.workload, one, two)
    verdicts += [*packing(one), *packing(two)]
    title = "Parity of two bundles"
    facts["date"] = _now()
    reference = f"against {found.want.name}"
    return _conclude(title, facts, a.workload, [found], verdicts, values.report, reference)


def _planned(directory: Path, config: ModelConfig) -> tuple[ModelConfig, str]:
    """Return the configuration with the dtype that "auto" means, and the precision."""
    plan = plan_backend(directory, config)
    return replace(config, dtype=plan.dtype_name), plan.precision


def _workload(directory: Path, config: ModelConfig, values: argparse.Namespace) -> Workload:
    plan = plan_backend(directory, config)
    model = plan.architecture.config
    if model.classes is not None:
        raise ConfigError(
            f"config.json: architectures is {model.architecture!r}; supported by this comparison: "
            "language models, whose labels are tokens"
        )
    return make_workload(
        values.workload,
        values.seed,
        model.vocab_size,
        plan.max_model_len,
        read_tokenizer(directory),
    )


def _refuse_overridden(settings: Settings) -> None:
    """Raise ConfigError if a flag is set for all backends that --backends sets for each."""
    for name in ("backend", "dtype", "attention", "quantization"):
        if settings.chosen[name].source != DEFAULT:
            raise ConfigError(f"--{name} is set beside --backends, which sets it for each backend")


def _lines(facts: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {what}" for name, what in facts.items())


def _facts(model: str, workload: Workload) -> dict[str, str]:
    items = sum(len(case.items) for case in workload.cases)
    longest = max(len(ids) for case in workload.cases for ids in case.prompt_ids())
    facts = {
        "model": model,
        "workload": f"{workload.size}, seed {workload.seed}: {len(workload.cases)} requests, "
        f"{items} items, prompts of up to {longest} tokens, SHA-256 {workload.digest[:16]}",
    }
    if workload.left_out:
        facts["left out"] = "; ".join(workload.left_out)
    return facts


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _listed(found: object) -> str:
    """Return names and versions as text."""
    parts = found if isinstance(found, dict) else {}
    return ", ".join(f"{name} {number}" for name, number in parts.items()) or "unknown"


def _hardware(about: Mapping[str, Any]) -> str:
    """Return a bundle's description of its hardware, which is only shown."""
    found = about.get("hardware")
    parts = found if isinstance(found, dict) else {}
    return (
        ", ".join(str(parts[name]) for name in ("tpu", "gpu", "cpu") if name in parts) or "unknown"
    )


def _conclude(
    title: str,
    facts: Mapping[str, str],
    workload: Workload,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
    report: str | None,
    reference: str,
) -> int:
    print(f"\n{aligned(HEAD, map(row, comparisons))}\n{ABOUT_RANKS}\n")
    print(f"Gates, {reference}:")
    for verdict in verdicts:
        print(verdict_line(verdict))
    if report is not None:
        from gpuscore.parity.report import write_report

        write_report(Path(report), title, facts, workload, comparisons, verdicts, reference)
    return EXIT_OK if all(verdict.passed for verdict in verdicts) else EXIT_FAILED
