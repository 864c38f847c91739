"""The commands `gpuscore parity run` and `record`."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

from gpuscore.backends import Plan, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.config.sources import DEFAULT, Settings
from gpuscore.errors import ConfigError
from gpuscore.measure.parity.bundle import Bundle, write_bundle
from gpuscore.measure.parity.fingerprint import fingerprint
from gpuscore.measure.parity.gates import judge, judge_pair
from gpuscore.measure.parity.machine import environment, hardware, versions
from gpuscore.measure.parity.output import EXIT_OK, conclude, hardware_of, listed, now
from gpuscore.measure.parity.progress import comparing
from gpuscore.measure.parity.runs import BackendSpec, Run, run_workload
from gpuscore.measure.parity.workload import Workload, make_workload, query_numbers, read_tokenizer
from gpuscore.models.hub import model_directory, model_name

_OF_BACKENDS = ("backend", "attention", "quantization")
_LOCAL = ("model", "compile_cache")  # flags with local paths, which a bundle leaves out


def run(values: argparse.Namespace, settings: Settings) -> int:
    """Compare every backend with transformers, and backends of the same format with each other."""
    specs = [BackendSpec.parse(text) for text in values.backends.split(",")]
    _refuse(settings, "--backends, which sets it for each backend", ("dtype", *_OF_BACKENDS))
    base = settings.make(ModelConfig)
    if len(set(specs)) < len(specs):
        raise ConfigError("--backends names a backend twice")
    directory = model_directory(base.model, base.revision)
    # Before minutes of work, to refuse a bad one and to know what "auto" means.
    planned = {str(spec): _planned(directory, spec.configure(base)) for spec in specs}
    workload = _workload(directory, planned[str(specs[0])][0], values)

    from gpuscore.measure.parity.oracle import free_memory, oracle_device, run_oracle

    device = oracle_device(base.device)
    frameworks = {spec.framework for spec in specs}
    machine = {"hardware": hardware("jax" if "jax" in frameworks else "torch")}
    about = {**_facts(model_name(base.model), workload), "oracle": f"transformers on {device}"}
    print(_lines(about), flush=True)
    halves = sorted({config.dtype for config, _ in planned.values()} - {"float32"})
    runs = []
    with comparing(workload, 1 + len(halves) + len(planned)) as begin:
        exact, *others = (
            run_oracle(
                directory, workload, dtype, device, base.threads, begin(f"transformers:{dtype}")
            )
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
    about |= {"date": now(), "hardware": hardware_of(machine), "versions": listed(versions())}
    reference = "against transformers in float32, unless another run is named"
    return conclude(title, about, workload, comparisons, verdicts, values.report, reference)


def record(values: argparse.Namespace, settings: Settings) -> int:
    """Score the workload with one backend, or with the oracle, and write a bundle."""
    config = settings.make(ModelConfig)
    output = Path(values.output)
    if output.exists():  # refused before minutes of work
        raise ConfigError(f"--output {output} exists already")
    if values.oracle:
        _refuse(settings, "--oracle, which runs transformers", _OF_BACKENDS)
    directory = model_directory(config.model, config.revision)
    workload = _workload(directory, config, values)
    print(_lines(_facts(model_name(config.model), workload)), flush=True)
    found, device = (_oracle_run if values.oracle else _backend_run)(directory, config, workload)
    about = {
        "model_name": model_name(config.model),
        "device": device,
        "created": now(),
        "versions": versions(),
        "hardware": hardware(config.backend),
        "environment": environment(),
        "flags": {name: value for name, value in asdict(config).items() if name not in _LOCAL},
    }
    write_bundle(output, Bundle(found, workload, fingerprint(directory), about))
    print(f"wrote {output}")
    return EXIT_OK


def _backend_run(directory: Path, config: ModelConfig, workload: Workload) -> tuple[Run, str]:
    """Return the run of a backend, and its device."""
    plan = plan_backend(directory, config)  # says what "auto" means on this machine
    spec = BackendSpec(config.backend, plan.dtype_name, config.attention)
    if plan.precision != "full":
        spec = replace(spec, quantization=plan.precision)
    config, precision = _planned(directory, config)
    with comparing(workload, 1) as begin:
        found = run_workload(str(spec), config, workload, precision, begin(str(spec)))
    return found, plan.device_name


def _oracle_run(directory: Path, config: ModelConfig, workload: Workload) -> tuple[Run, str]:
    """Return the run of transformers in the config's dtype, and its device."""
    from gpuscore.measure.parity.oracle import oracle_device, run_oracle

    dtype, device = _planned(directory, config)[0].dtype, oracle_device(config.device)
    with comparing(workload, 1) as begin:
        scored = begin("transformers")
        return run_oracle(directory, workload, dtype, device, config.threads, scored), device


def _planned(directory: Path, config: ModelConfig) -> tuple[ModelConfig, str]:
    """Return the configuration with the dtype that "auto" means, and the precision."""
    plan = plan_backend(directory, config)
    return replace(config, dtype=plan.dtype_name), plan.precision


def _workload(directory: Path, config: ModelConfig, values: argparse.Namespace) -> Workload:
    plan = plan_backend(directory, config)
    return make_workload(
        values.workload,
        values.seed,
        vocabulary(plan),
        plan.max_model_len,
        read_tokenizer(directory),
        values.seeds,
    )


def vocabulary(plan: Plan) -> int:
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
    items = sum(len(case.items) for case in workload.cases)
    longest = max(len(ids) for case in workload.cases for ids in case.prompt_ids())
    facts = {
        "model": model,
        "workload": f"{workload.size}, {workload.seeds_as_text}: {len(workload.cases)} requests of "
        f"{len(set(query_numbers(workload).values()))} queries, {items} items, prompts of up to "
        f"{longest} tokens, SHA-256 {workload.digest[:16]}",
    }
    if workload.left_out:
        facts["left out"] = "; ".join(workload.left_out)
    return facts
