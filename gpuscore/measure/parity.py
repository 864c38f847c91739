"""The commands `gpuscore parity run` and `record`."""

import argparse
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpuscore.backends import Plan, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.config.sources import DEFAULT, Settings
from gpuscore.errors import ConfigError
from gpuscore.measure.bundle import Bundle, write_bundle
from gpuscore.measure.compare import judged
from gpuscore.measure.fingerprint import fingerprint
from gpuscore.measure.report import EXIT_OK, conclude, now
from gpuscore.measure.runs import configured, run_workload
from gpuscore.measure.workload import TEXT, Workload, make_workload, query_numbers, read_tokenizer
from gpuscore.models.hub import model_directory, model_name
from gpuscore.system.machine import local_machine, versions

_OF_BACKENDS = ("backend", "attention", "quantization")
_LOCAL = ("model",)  # flags with local paths, which a bundle leaves out


def run(values: argparse.Namespace, settings: Settings) -> int:
    """Compare every backend with transformers."""
    specs = values.backends.split(",")
    _refuse(settings, "--backends, which sets it for each backend", ("dtype", *_OF_BACKENDS))
    base = settings.make(ModelConfig)
    if len(set(specs)) < len(specs):
        raise ConfigError("--backends names a backend twice")
    directory, name = model_directory(base.model, base.revision), model_name(base.model)
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
        replace(run_oracle(directory, workload, dtype, device, base.threads), model=name)
        for dtype in ("float32", *halves)
    ]
    servers = []
    for spec, plan in plans.items():
        config = replace(configs[spec], dtype=plan.dtype_name)
        servers.append(run_workload(spec, config, workload, plan.precision))
        free_memory()
    facts |= {"date": now(), "hardware": local_machine(), "versions": versions()}
    title = f"Parity of {name} with transformers in float32"
    return conclude(values.report, title, (), judged(servers, references), {"Run": facts})


def record(values: argparse.Namespace, settings: Settings) -> int:
    """Score the workload with one backend, or with the oracle, and write a bundle."""
    config = settings.make(ModelConfig)
    if values.oracle:
        _refuse(settings, "--oracle, which runs transformers", _OF_BACKENDS)
    directory, name = model_directory(config.model, config.revision), model_name(config.model)
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
        "flags": {name: value for name, value in asdict(config).items() if name not in _LOCAL},
    }
    made = replace(made, model=name, facts=facts, digests=fingerprint(directory))
    write_bundle(Path(values.output), Bundle({}, (made,)))
    print(f"wrote {values.output}")
    return EXIT_OK


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
    queries = len(set(query_numbers(workload.cases).values()))
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
