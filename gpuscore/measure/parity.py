"""The commands `gpuscore parity run` and `record`."""

import argparse
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from gpuscore.backends import Plan, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.config.sources import DEFAULT, Settings
from gpuscore.errors import ConfigError
from gpuscore.measure.bundle import About, Measured, write_folder
from gpuscore.measure.compare import judged
from gpuscore.measure.fingerprint import fingerprint
from gpuscore.measure.report import EXIT_OK, Findings, now
from gpuscore.measure.results import Run
from gpuscore.measure.runs import configured, run_workload
from gpuscore.measure.workload import TEXT, Workload, make_workload, query_numbers, read_tokenizer
from gpuscore.models.hub import model_directory, model_name
from gpuscore.system.machine import local_machine, versions

_OF_BACKENDS = ("backend", "attention", "quantization")
_LOCAL = ("model",)  # flags with local paths, which a bundle leaves out
# What XLA and libtpu read; some of their flags change the order of sums.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")


def run(values: argparse.Namespace, settings: Settings) -> int:
    """Compare every backend with transformers, and backends of the same format with each other."""
    specs = values.backends.split(",")
    _refuse(settings, "--backends, which sets it for each backend", ("dtype", *_OF_BACKENDS))
    base = settings.make(ModelConfig)
    if len(set(specs)) < len(specs):
        raise ConfigError("--backends names a backend twice")
    directory = model_directory(base.model, base.revision, base.adapter)
    name = model_name(base.model)
    # Before minutes of work, to refuse a bad one and to know what "auto" means.
    configs = {spec: configured(spec, base) for spec in specs}
    plans = {spec: plan_backend(directory, config) for spec, config in configs.items()}
    workload = _workload(directory, plans[specs[0]], values)

    from gpuscore.measure.oracle import free_memory, oracle_device, run_oracle

    device = oracle_device(base.device)
    facts = {**_facts(name, workload), "oracle": f"transformers on {device}"}
    _say(facts)
    halves = sorted({plan.dtype_name for plan in plans.values()} - {"float32"})
    references = [
        _scored(name, workload, run_oracle(directory, workload, dtype, device, base.threads))
        for dtype in ("float32", *halves)
    ]
    servers = []
    for spec, plan in plans.items():
        config = replace(configs[spec], dtype=plan.dtype_name)
        servers.append(
            _scored(name, workload, run_workload(spec, config, workload, plan.precision))
        )
        free_memory()
    found, verdicts = judged(servers, references)
    for first, second in combinations(servers, 2):
        if first.about.dtype == second.about.dtype:
            verdicts += judged([first, second])[1]
    facts |= {"date": now(), "hardware": local_machine(), "versions": versions()}
    title = f"Parity of {name} with transformers in float32"
    return Findings(title, (), found, verdicts, {"Run": facts}).conclude(values.report)


def record(values: argparse.Namespace, settings: Settings) -> int:
    """Score the workload with one backend, or with the oracle, and write a bundle."""
    config = settings.make(ModelConfig)
    output = Path(values.output)
    if output.exists():  # refused before minutes of work
        raise ConfigError(f"--output {output} exists already")
    if values.oracle:
        _refuse(settings, "--oracle, which runs transformers", _OF_BACKENDS)
    directory = model_directory(config.model, config.revision, config.adapter)
    name = model_name(config.model)
    plan = plan_backend(directory, config)  # says what "auto" means on this machine
    workload = _workload(directory, plan, values)
    _say(_facts(name, workload))
    if values.oracle:
        from gpuscore.measure.oracle import oracle_device, run_oracle

        device = oracle_device(config.device)
        made = run_oracle(directory, workload, plan.dtype_name, device, config.threads)
    else:
        device, planned = plan.device_name, replace(config, dtype=plan.dtype_name)
        kind = plan.dtype_name if plan.precision == "full" else plan.precision
        spec = f"{config.backend}:{kind}:{config.attention}".removesuffix(":auto")
        made = run_workload(spec, planned, workload, plan.precision)
    facts = {
        "device": device,
        "created": now(),
        "hardware": local_machine(),
        "versions": versions(),
        "environment": environment(),
        "flags": {name: value for name, value in asdict(config).items() if name not in _LOCAL},
    }
    scored = _scored(name, workload, made)
    about = replace(scored.about, facts=facts)
    write_folder(output, replace(scored, about=about, model=fingerprint(directory)))
    print(f"wrote {output}")
    return EXIT_OK


def _scored(model: str, workload: Workload, run: Run) -> Measured:
    about = About(run.name, "score", model, workload.vocab_rows, run.dtype)
    return Measured(about, workload, run)


def _workload(directory: Path, plan: Plan, values: argparse.Namespace) -> Workload:
    tokenizer = read_tokenizer(directory)
    size = values.workload or ("standard" if tokenizer is None else TEXT)
    model = plan.architecture.config
    if model.classes is not None:
        raise ConfigError(
            f"config.json: architectures is {model.architecture!r}; supported by this comparison: "
            "language models, whose labels are tokens"
        )
    return make_workload(size, values.seed, model.vocab_size, plan.max_model_len, tokenizer)


def _refuse(settings: Settings, other: str, names: Iterable[str]) -> None:
    """Raise ConfigError if one of these flags is set beside another one, which excludes it."""
    for name in names:
        if settings.chosen[name].source != DEFAULT:
            raise ConfigError(f"--{name} is set beside {other}")


def _facts(model: str, workload: Workload) -> dict[str, Any]:
    queries = len(set(query_numbers(workload).values()))
    longest = max(len(ids) for case in workload.cases for ids in case.prompt_ids())
    facts: dict[str, Any] = {
        "model": model,
        "workload": f"{workload.named}: {len(workload.cases)} requests of "
        f"{queries} queries, {workload.num_items} items, prompts of up to {longest} tokens, "
        f"SHA-256 {workload.digest[:16]}",
    }
    if workload.left_out:
        facts["left out"] = "; ".join(workload.left_out)
    return facts


def _say(facts: dict[str, Any]) -> None:
    print("\n".join(f"{name}: {what}" for name, what in facts.items()) + "\n", flush=True)


def environment() -> dict[str, str]:
    """Return the variables that affect scores and are set; local paths in them are left out."""
    return {
        name: re.sub(r"=\S*[/\\]\S*", "=PATH", os.environ[name])
        for name in _VARIABLES
        if os.environ.get(name)
    }
